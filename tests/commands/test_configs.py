"""`configs` lists the recipes and prints them byte by byte."""

from pathlib import Path

import pytest

from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main
from gpt2_triton.commands.configs import describe
from gpt2_triton.config import recipes

CONFIGS = Path(__file__).parents[2] / "configs"


def test_list_has_a_line_for_each_recipe_by_size(capsys):
    assert main(tools, ["configs"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    listed = lines[: lines.index("")]
    assert head.split() == ["recipe", "parameters", "tokens", "one", "H200"]
    assert sorted(line.split()[0] for line in listed) == recipes.names()
    of = {line.split()[0]: line.split(maxsplit=1)[1] for line in listed}
    assert of["gpt2_124m"].split() == "124M 10.3B 4.5 hours GPT-2 124M on FineWeb".split()
    assert of["gpt2_1558m"].split() == "1.56B 33.6B 7.2 days GPT-2 1558M on FineWeb-Edu".split()
    assert [*of].index("gpt2_124m") < [*of].index("gpt2_350m") < [*of].index("gpt2_1558m")


@pytest.mark.parametrize(
    ("line", "title", "time"),
    [
        ("# GPT-2 on X (it): 1B tokens; 5 hours on 8 H200s, 38 hours on one at 1k tokens/s.", "GPT-2 on X", "38 hours"),
        ("# Finetunes a model on Y: 2M tokens, seconds on one GPU; more.", "Finetunes a model on Y", "seconds"),
        ("# Trains on your own text.", "Trains on your own text", ""),
        ("", "", ""),
    ],
)
def test_title_and_time_are_those_of_the_first_line(line, title, time):
    assert describe(line) == (title, time)


@pytest.mark.parametrize("file", sorted(CONFIGS.iterdir()), ids=lambda file: file.name)
def test_print_gives_the_file(capfdbinary, file):
    name = file.stem if file.suffix == ".yaml" else file.name
    assert main(tools, ["configs", name]) == 0
    assert capfdbinary.readouterr().out == file.read_bytes()


def test_unknown_name_gets_the_list(capsys):
    assert main(tools, ["configs", "gpt2-124"]) == 2
    expected = f"error: gpt2-124: no such recipe; did you mean gpt2_124m? recipes: {', '.join(recipes.names())}\n"
    assert capsys.readouterr().err == expected
