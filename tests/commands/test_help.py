"""--help of every command: fits a narrow terminal, explains every parameter, and tells the commands apart."""

import re

import pytest

from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main
from gpt2_triton.commands.prepare import app as prepare
from gpt2_triton.commands.train import app as train

COMMANDS = [[name] for name in tools if not name.startswith("-")]
COMMANDS += [["prepare", name] for name in prepare if not name.startswith("-")]


def page(app, words, monkeypatch, capsys, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(app, [*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_parameter_is_explained(words, monkeypatch, capsys):
    assert max(map(len, page(tools, words, monkeypatch, capsys).splitlines())) <= 80
    text = page(tools, words, monkeypatch, capsys, columns=300)
    for row in re.findall(r"^│ (?:\*  )?(.*?) *│$", text, re.MULTILINE):
        name, *meaning = re.split(r" {2,}", row.strip())
        assert meaning and len(re.sub(r"\[.*?\]", "", meaning[0])) > 5, row  # more than a default
        assert "{" not in row


@pytest.mark.parametrize("words", [[], ["prepare"]], ids=["tools", "prepare"])
def test_no_two_commands_have_the_same_summary(words, monkeypatch, capsys):
    text = page(tools, words, monkeypatch, capsys)
    entries = re.split(r"^│ (?=[a-z-])", text, flags=re.MULTILINE)[1:]
    summaries = [" ".join(re.sub(r"[│╰─╯]", "", entry).split()[1:]) for entry in entries]
    assert len(set(summaries)) == len(summaries) > 4 and all(summaries)


def test_train_lists_its_own_options_before_the_keys(monkeypatch, capsys):
    text = page(train, [], monkeypatch, capsys)
    assert text.index("--run_dir") < text.index("─ Keys of the configuration ─") < text.index("--model.size")
