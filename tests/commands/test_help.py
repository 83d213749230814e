"""The help text of each command fits a narrow terminal and explains every parameter."""

import functools
import operator
import re

import pytest
from rich.console import Console

from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main
from gpt2_triton.commands.prepare import app as prepare
from gpt2_triton.commands.train import app as train
from gpt2_triton.config.schema import options

COMMANDS = [[name] for name in tools if not name.startswith("-")]
COMMANDS += [["prepare", name] for name in prepare if not name.startswith("-")]


def page(app, words, monkeypatch, capsys):
    monkeypatch.setattr(app, "console", Console(width=80))
    assert main(app, [*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_parameter_is_explained(words, monkeypatch, capsys):
    text = page(tools, words, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= 80
    app = functools.reduce(operator.getitem, words, tools)
    arguments = (
        app.assemble_argument_collection(parse_docstring=True) if app.default_command else []
    )
    for parameter in (argument.parameter for argument in arguments if argument.show):
        assert parameter.help, parameter.name
        assert " ".join(parameter.help.split()[:3]) in " ".join(re.sub("[│╰─╯]", "", text).split())


def test_the_usage_names_what_the_arguments_are_called(monkeypatch, capsys):
    names = {
        "plot": "RUNS...",
        "configs": "[NAME]",
        "perplexity": "[SHARDS...]",
        "prepare text": "INPUTS...",
        "compile": "VALUE]...",
    }
    for words, name in names.items():
        assert page(tools, words.split(), monkeypatch, capsys).splitlines()[0].endswith(f" {name}")


@pytest.mark.parametrize(("app", "words"), [(train, ["gpt2_124m"]), (tools, ["train"])])
def test_train_lists_its_own_options_then_every_key_with_its_meaning(
    app, words, monkeypatch, capsys
):
    text = page(app, words, monkeypatch, capsys)
    assert (
        text.index("--run_dir")
        < text.index("─ Keys of the configuration ─")
        < text.index("--model.size")
    )
    assert text.index("--plan --gpu 4090\n") < text.index("*  CONFIG") and "BOOL" not in text
    words = re.sub("[│╰─╯]", " ", text).split()
    flags = {"--data", "--field", "--strict", "--plan", "--gpus", "--run_dir", "--resume"}
    assert flags <= {*words} and not [w for w in words if re.match(r"--(?!no-)[\w.]+-", w)]
    for key, field in options():
        assert f"--{key}" in words and field.description.split()[0] in words
