"""The help text of each command fits a narrow terminal and explains every parameter; no two summaries are equal."""

import functools
import operator
import re
from pathlib import Path

import pytest
from rich.console import Console

from gpt2_triton.commands import OF_A_CHECKOUT, tools
from gpt2_triton.commands.app import main
from gpt2_triton.commands.prepare import app as prepare
from gpt2_triton.commands.train import app as train
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.commands.train_help import recipe_defaults
from gpt2_triton.config.config import options
from gpt2_triton.config.load import load_config
from gpt2_triton.errors import ConfigError

COMMANDS = [[name] for name in tools if not name.startswith("-")]
COMMANDS += [["prepare", name] for name in prepare if not name.startswith("-")]


def page(app, words, monkeypatch, capsys):
    monkeypatch.setattr(app, "console", Console(width=80))
    assert main(app, [*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_parameter_is_explained(words, monkeypatch, capsys):
    text = page(tools, words, monkeypatch, capsys)
    assert max(map(len, text.splitlines())) <= 80 and "ARGS" not in text
    app = functools.reduce(operator.getitem, words, tools)
    arguments = app.assemble_argument_collection(parse_docstring=True) if app.default_command else []
    for parameter in (argument.parameter for argument in arguments if argument.show):
        assert parameter.help, parameter.name
        assert " ".join(parameter.help.split()[:3]) in " ".join(re.sub("[│╰─╯]", "", text).split())


def test_list_leaves_out_what_needs_a_checkout(monkeypatch, capsys):
    text = page(tools, [], monkeypatch, capsys)
    assert "plot" in text and not any(name in text for name in OF_A_CHECKOUT)


@pytest.mark.parametrize("words", [[], ["prepare"]], ids=["tools", "prepare"])
def test_no_two_commands_have_the_same_summary(words, monkeypatch, capsys):
    text = page(tools, words, monkeypatch, capsys)
    entries = re.split(r"^│ (?=[a-z-])", text, flags=re.MULTILINE)[1:]
    summaries = [" ".join(re.sub(r"[│╰─╯]", "", entry).split()[1:]) for entry in entries]
    assert len(set(summaries)) == len(summaries) > 4 and all(summaries)


def test_train_lists_its_own_options_before_the_keys(monkeypatch, capsys):
    text = page(train, [], monkeypatch, capsys)
    assert text.index("--run_dir") < text.index("─ Keys of the configuration ─") < text.index("--model.size")


def test_help_of_a_recipe_has_its_values(monkeypatch, capsys):
    text = page(train, ["gpt2_124m_fast"], monkeypatch, capsys)
    assert default_of(text, "optim.lr") == "0.0018" and default_of(text, "optim.beta1") == "0.9" and "--debug." in text
    assert recipe_defaults(None) == recipe_defaults(Path("none.yaml")) == {}


@pytest.mark.parametrize("key", [key for key, field in options() if field.annotation is bool])
@pytest.mark.parametrize("words", [[], ["quickstart"]])
def test_help_of_a_boolean_key_lists_the_values_that_it_takes(monkeypatch, capsys, words, key):
    text = page(train, words, monkeypatch, capsys)
    assert entry_of(text, key).endswith("[choices: true, false] [default: false]")
    for value in "true", "false":
        section, name = key.split(".")
        config = load_config("quickstart", parse_overrides([f"--{key}", value]))
        assert getattr(getattr(config, section), name) is (value == "true")
    with pytest.raises(ConfigError, match=f"--{key}: expected a value after it"):
        parse_overrides([f"--{key}"])


def test_help_of_an_unknown_recipe_is_an_error(capsys):
    assert main(train, ["nope", "--help"]) == 2
    assert "nope" in capsys.readouterr().err
    assert main(train, ["--train.steps", "5", "--help"]) == 0


def test_help_of_own_lists_the_keys_that_it_sets(monkeypatch, capsys):
    text = page(train, ["own"], monkeypatch, capsys)
    assert default_of(text, "train.steps") == "by the text" and default_of(text, "checkpoint.best") == "val_loss"
    options = set(re.findall(r"--(\w+\.\w+)", text))
    assert {"data.train", "optim.final_frac"} <= options and not {"optim.beta1", "debug.hash_state"} & options


def default_of(text, option):
    return re.search(r"\[default: ([^]]*)\]", entry_of(text, option))[1]


def entry_of(text, option):
    """Return what a page of help, whose lines are broken to fit, has about an option."""
    entry = re.split(r"│ --", text.split(f"--{option} ")[1])[0]
    return " ".join(re.sub("[│╰─╯]", "", entry).split())
