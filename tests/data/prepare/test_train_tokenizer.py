"""The command `tokenizer`: a byte-level BPE of one's own text."""

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_triton.data.prepare import train_tokenizer
from gpt2_triton.data.tokenizer import get_tokenizer, identity
from gpt2_triton.errors import DataError
from tests.support.commands import run_tool
from tests.support.json_files import edit_json
from tests.support.tokenizer_files import HARD


@pytest.fixture
def greek(tmp_path, monkeypatch):
    """A text of random Greek words, each several times."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    words = ["".join(draw.choices("αβγδεζηθικλμνξοπρστυφχψω", k=6)) for _ in range(300)]
    (tmp_path / "my.txt").write_text(" ".join(draw.choices(words, k=6000)))
    return tmp_path


def test_a_tokenizer_is_trained_on_a_text(greek, capsys):
    assert run_tool("tokenizer my.txt --vocab 600 --out tok") == 0
    out = capsys.readouterr().out
    [own, gpt2] = [line for line in out.splitlines() if "tokens" in line]
    assert own.startswith("600 tokens, ") and " bytes per token on " in own
    assert float(own.split()[2]) > 2 * float(gpt2.split()[-1])
    assert "next: " in out and "--data.tokenizer tok" in out
    coder = get_tokenizer(str(greek / "tok"))
    assert (coder.vocab_size, coder.end) == (600, "<|endoftext|>")
    for text in HARD:
        assert coder.decode(coder.encode(text)) == text


def test_without_gpt2s_merges_it_says_that_it_does_not_compare(greek, monkeypatch, capsys):
    def absent(name):
        raise DataError(f"tokenizer {name}: no merges; bring some")

    monkeypatch.setattr(train_tokenizer, "get_tokenizer", absent)
    assert run_tool("tokenizer my.txt --vocab 300") == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "not compared with GPT-2's: tokenizer gpt2: no merges"
    )


def test_a_text_without_enough_pairs_says_so(greek, capsys):
    (greek / "my.txt").write_text("abcd " * 200)
    assert run_tool("tokenizer my.txt") == 0
    assert "no more pairs that occur twice (16,384 were asked for)" in capsys.readouterr().out


def test_the_next_command_names_the_field(greek, capsys):
    (greek / "my.jsonl").write_text(json.dumps({"doc": {"is": "It was. " * 30}}) + "\n")
    assert run_tool("tokenizer my.jsonl --field doc.is --vocab 257") == 0
    assert " own --data my.jsonl --field doc.is --data.tokenizer " in capsys.readouterr().out


def test_a_directory_that_is_there_is_kept(greek, capsys):
    (greek / "tok").mkdir()
    (greek / "tok" / "mine").touch()
    assert run_tool("tokenizer missing.txt --out tok") == 2
    # before a text is read
    assert "tok is there already; choose another" in capsys.readouterr().err


def test_a_full_disk_is_one_line_that_names_the_directory(greek, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train_tokenizer, "write_json", refuse)
    assert run_tool("tokenizer my.txt --vocab 300 --out tok") == 2
    assert capsys.readouterr().err == "error: tok: No space left on device; make room\n"
    assert os.listdir(greek) == ["my.txt"]


ENDLESS = """
import itertools, os, signal, sys, threading
from gpt2_triton.commands import run
from gpt2_triton.data.prepare import train_tokenizer

def pieces(*_):
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    yield from itertools.repeat("It was. ")

train_tokenizer._pieces = pieces
sys.exit(run())
"""


def test_a_ctrl_c_ends_the_training_at_once(greek):
    """The library returns to Python's handler at the training's end only."""
    words = [sys.executable, "-c", ENDLESS, "tokenizer", "my.txt", "--out", "tok"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    assert os.listdir(greek) == ["my.txt"]


@pytest.mark.slow
def test_equal_texts_give_equal_files(greek):
    for name in ("a", "b"):
        command = [sys.executable, "-m", "gpt2_triton", "tokenizer", "my.txt", "--out", name]
        subprocess.run(command, check=True)
    files = [(greek / name / "tokenizer.json").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1] and identity(str(greek / "a")) == identity(str(greek / "b"))


def test_a_tokenizer_that_loses_characters_is_told(greek, capsys):
    """As SmolLM2's, which has no tokens for some bytes."""
    assert run_tool("tokenizer my.txt --vocab 300 --out tok") == 0
    edit_json(greek / "tok" / "tokenizer.json", normalizer={"type": "Lowercase"})
    (greek / "my.txt").write_text("It was the best of times. " * 300)
    assert run_tool("prepare text my.txt --tokenizer tok --out data/shards") == 0
    assert "note: 2 of 2 samples of the text come back changed" in capsys.readouterr().out


def test_few_bytes_of_gpt2s_tokens_are_told(greek, capsys):
    assert run_tool("prepare text my.txt --out data/shards") == 0
    out = capsys.readouterr().out
    assert "note: GPT-2's tokens have 1." in out and ", then --tokenizer tok, or " in out
    keys = "--data.tokenizer gpt2 --data.train 'data/shards/train_*.bin' --data.val "
    assert out.endswith(f"train CONFIG {keys}'data/shards/val_*.bin'\n")
    (greek / "my.txt").write_text("It was the best of times. " * 300)
    assert run_tool("prepare text my.txt --out data/english") == 0
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize(("text", "told"), [("α γ " * 3000, True), ("It was. " * 900, False)])
def test_bytes_as_tokens_are_told_for_other_alphabets(greek, capsys, text, told):
    (greek / "my.txt").write_text(text)
    assert run_tool("prepare text my.txt --tokenizer bytes --out data/shards") == 0
    assert ("bytes, each a token" in capsys.readouterr().out) == told
