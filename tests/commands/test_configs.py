"""`configs` lists the recipes and prints them, without the markers that fill in figures."""

import re
from pathlib import Path

import pytest

from gpt2_triton.config import recipes
from tests.support.commands import run_tool

CONFIGS = Path(__file__).parents[2] / "configs"


def test_list_has_a_line_for_each_recipe_by_size(capsys):
    assert run_tool("configs") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["recipe", "parameters", "tokens"]
    listed = [line.split() for line in lines[: lines.index("")]]
    assert sorted(line[0] for line in listed) == recipes.names() and listed[0][0].startswith("own")
    rows = [line[:6] for line in listed]
    small, large = (
        "gpt2_124m 124M 10.3B GPT-2 124M on".split(),
        "gpt2_1558m 1.56B 33.6B GPT-2 1558M on".split(),
    )
    assert rows.index(small) < rows.index(large)


@pytest.mark.parametrize("file", sorted(CONFIGS.iterdir()), ids=lambda file: file.name)
def test_print_gives_the_file(capfd, file):
    assert run_tool(f"configs {file.name.removesuffix('.yaml')}") == 0
    assert capfd.readouterr().out == re.sub("  # r: .*", "", file.read_text())


def test_unknown_name_gets_the_list(capsys):
    assert run_tool("configs gpt2-124") == 2
    assert "did you mean gpt2_124m?" in capsys.readouterr().err
