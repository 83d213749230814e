"""Every command of README.md and docs/interop.md is accepted, every file that README.md names is there."""

import re
import shlex
from pathlib import Path

import pytest

from gpt2_triton.cli import main
from gpt2_triton.commands import app as tools_app
from gpt2_triton.commands.train import app as train_app
from tests.foreign import checkpoint_of, config_of, nanogpt_checkpoint, nanogpt_content, random_params

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text().replace("\\\n", "")
COMMANDS = [
    line.split(" # ")[0].strip()
    for block in re.findall(r"^```\n(.*?)^```", TEXT + (ROOT / "docs" / "interop.md").read_text(), re.M | re.S)
    for line in block.splitlines()
    if line.startswith(("python train.py", "python -m gpt2_triton"))
]


def test_there_are_commands():
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train.py" in c])
def test_training_commands(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[2:]
    planned = "--plan" in words
    assert main(train_app, words if planned else [*words, "--print_config"]) == 0
    assert ("\narena " if planned else "n_embd: ") in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m gpt2_triton" in c])
def test_tool_commands(command, capsys, monkeypatch, tmp_path):
    """The words are understood (no exit code 2); the runs they name have a checkpoint only to export, else none (4)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mytext.txt").write_text("To be, or not to be: that is the question.\n" * 50)
    for run in ("mine", "other"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5, "tokens": 1024}\n')
    for download in ("dataset.prepare_dataset", "pretokenized.download"):  # tests/data/test_fineweb.py runs them
        monkeypatch.setattr(f"gpt2_triton.data.{download}", lambda *arguments: None)
    words = shlex.split(command)[3:]
    if words[0] in ("verify", "bench"):
        words.append("--help")  # the commands themselves are tests/test_verify.py and tests/test_bench.py
    if words[0] == "export":
        config = config_of()
        checkpoint_of(tmp_path / "runs" / "mine", config, {"params": random_params(config)})
        nanogpt_checkpoint(tmp_path, nanogpt_content(random_params(config)))
    needs_weights = words[0] in ("sample", "hellaswag", "perplexity")
    assert main(tools_app, words) == (4 if needs_weights else 0), capsys.readouterr().err


LINKS = re.findall(r"\]\(([\w/.]+)\)", TEXT)
FILES = re.findall(r"`((?:tests|docs|benchmarks|configs|gpt2_triton)/[\w/.]*)`", TEXT)


@pytest.mark.parametrize("path", sorted({*LINKS, *FILES}))
def test_files_exist(path):
    assert (ROOT / path).exists()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", TEXT, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
