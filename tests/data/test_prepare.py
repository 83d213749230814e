"""A data directory is there whole or not at all, says what it was made of, and holds the tokens of the whole text."""

import errno
import functools
import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.data import prepare, tokenizer
from gpt2_triton.data.prepare import builtin_shards, builtin_text, pieces, prepare_builtin, prepare_text
from gpt2_triton.data.shards import DataError, open_shards
from gpt2_triton.data.tokenizer import GPT2Tokenizer

SHAKESPEARE = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"
TEXT = "".join(f"line {i}: \N{GREEK SMALL LETTER PI} is {22 / 7 + i:.3f}\n" for i in range(200))


@functools.cache
def gpt2():
    """GPT-2's tokenizer from the installed files: no test waits for a network."""
    return GPT2Tokenizer(tokenizer._encoding_from_merges(tokenizer._installed_merges()))


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "input.txt").write_text(TEXT)
    return tmp_path / "input.txt"


def tokens_of(directory, split):
    return np.concatenate([s.tokens for s in open_shards(str(directory / f"{split}_*.bin"), 50257, 4)])


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_tinyshakespeare_has_the_known_number_of_tokens(tmp_path, monkeypatch):
    if not SHAKESPEARE.exists():
        pytest.skip(f"{SHAKESPEARE} is not there")
    monkeypatch.setattr(prepare, "get_tokenizer", lambda name: gpt2())
    lines = []
    out = prepare_text([SHAKESPEARE], tmp_path / "out", "gpt2", progress=lines.append)
    assert [len(tokens_of(out, split)) for split in ("train", "val")] == [301_966, 36_059]
    assert "100% of 1,003,854 characters, 301,966 tokens" in lines[0] and lines[0].endswith("tokens/s")


def test_a_text_is_split_by_characters_and_its_record_tells_all(tmp_path, text_file):
    out = prepare_text([text_file], tmp_path / "a" / "out", "bytes", val_fraction=0.25)
    cut = int(len(TEXT) * 0.75)
    assert bytes(tokens_of(out, "train").astype(np.uint8)).decode() == TEXT[:cut]
    assert bytes(tokens_of(out, "val").astype(np.uint8)).decode() == TEXT[cut:]
    record = json.loads((out / "shards.json").read_text())
    assert record["source"] == [{"file": "input.txt", "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}]
    assert (record["tokenizer"], record["val_fraction"]) == ("bytes", 0.25)
    assert sorted(record["shards"]) == ["train_000000.bin", "val_000000.bin"]
    for name, row in record["shards"].items():
        data = (out / name).read_bytes()
        assert row == {"tokens": (len(data) - 1024) // 2, "sha256": hashlib.sha256(data).hexdigest()}
    assert sorted(os.listdir(tmp_path / "a")) == ["out"] and os.stat(out).st_mode & 0o777 == 0o755


def test_documents_are_parted_by_the_end_of_text_token(tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for file, text in zip(files, ("aaaaa", "bbbbb", "cccccccccc"), strict=True):
        file.write_text(text)
    out = prepare_text(files, tmp_path / "out", "bytes", val_fraction=0.6)
    assert bytes(tokens_of(out, "train").astype(np.uint8)) == b"aaaaa\0bbb"
    assert bytes(tokens_of(out, "val").astype(np.uint8)) == b"bb\0cccccccccc"


def test_shards_are_of_equal_size_so_that_none_is_too_short(tmp_path, text_file):
    out = prepare_text([text_file], tmp_path / "out", "bytes", shard_tokens=1000)
    whole = prepare_text([text_file], tmp_path / "whole", "bytes")
    sizes = [len(s.tokens) for s in open_shards(str(out / "train_*.bin"), 256, 4)]
    assert len(sizes) > 3 and max(sizes) <= 1000 and max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(tokens_of(out, "train"), tokens_of(whole, "train"))
    assert sorted(p.name for p in out.glob("val*")) == ["val_000000.bin"]


SPACES = "\n \t\r\f\x1c\x85\xa0\N{LINE SEPARATOR}\N{IDEOGRAPHIC SPACE}"


@given(text=st.text(st.sampled_from("a'sé1.\N{GRINNING FACE}" + SPACES), max_size=60), size=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_pieces_have_the_tokens_of_the_whole(text, size):
    encode = gpt2().encode
    parts = list(pieces(text, size))
    assert "".join(parts) == text and all(len(part) >= size for part in parts[:-1])
    assert [t for part in parts for t in encode(part)] == encode(text).tolist()


def test_preparing_again_finds_it_done(tmp_path, text_file):
    lines = []
    out = prepare_text([text_file], tmp_path / "out", "bytes")
    before = {p.name: p.stat().st_ino for p in out.iterdir()}
    assert prepare_text([text_file], tmp_path / "out", "bytes", progress=lines.append) == out
    assert {p.name: p.stat().st_ino for p in out.iterdir()} == before and "already" in lines[0]


def test_other_data_is_never_written_over(tmp_path, text_file):
    out = prepare_text([text_file], tmp_path / "out", "bytes")
    before = contents(out)
    with pytest.raises(DataError, match="out: in use: .*remove it or choose another"):
        prepare_text([text_file], out, "bytes", val_fraction=0.2)
    assert contents(out) == before and sorted(os.listdir(tmp_path)) == ["input.txt", "out"]
    (out / "val_000000.bin").write_bytes(b"cut off")
    with pytest.raises(DataError, match="in use"):
        prepare_text([text_file], out, "bytes")


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    for name, message in (
        ("missing.txt", "cannot read: got No such file"),
        ("empty.txt", "empty: got 0 bytes, expected text"),
        ("latin.txt", "not UTF-8: got byte 0xe9 at 3, expected text in UTF-8; convert it with `iconv"),
    ):
        with pytest.raises(DataError, match=f"{name}: {message}"):
            prepare_text([tmp_path / name], tmp_path / "out", "bytes")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 1.5])
def test_a_split_without_tokens_is_refused(tmp_path, text_file, fraction):
    with pytest.raises(DataError, match=f"val_fraction: an empty split: got {fraction} of"):
        prepare_text([text_file], tmp_path / "out", "bytes", val_fraction=fraction)


def test_a_full_disk_leaves_nothing(tmp_path, text_file, monkeypatch):
    def full(path, tokens):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare, "write_shard", full)
    with pytest.raises(DataError, match="out: cannot write: got No space left on device"):
        prepare_text([text_file], tmp_path / "out", "bytes")
    assert os.listdir(tmp_path) == ["input.txt"]


def _prepare_and_die(text_file, out):
    write = prepare.write_shard

    def write_shard(path, tokens):
        write(path, tokens)
        if path.name.startswith("val"):
            os.kill(os.getpid(), signal.SIGKILL)

    prepare.write_shard = write_shard
    prepare_text([text_file], out, "bytes")


def test_a_killed_preparation_shows_nothing_and_can_be_run_again(tmp_path, text_file):
    process = multiprocessing.get_context("spawn").Process(target=_prepare_and_die, args=(text_file, tmp_path / "out"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [p.name for p in tmp_path.glob("*") if not p.name.startswith(".")] == ["input.txt"]
    again = prepare_text([text_file], tmp_path / "out", "bytes")
    assert contents(again) == contents(prepare_text([text_file], tmp_path / "once", "bytes"))


# ---- the built-in text ----


def test_the_built_in_shards_hold_the_built_in_text(tmp_path):
    out = builtin_shards("bytes", tmp_path / "data")
    text = builtin_text().encode()
    assert out.parent == tmp_path / "data" and out.name == f"builtin_bytes_{hashlib.sha256(text).hexdigest()[:8]}"
    assert bytes(np.concatenate([tokens_of(out, s) for s in ("train", "val")]).astype(np.uint8)) == text
    assert len(text) > 300_000 and builtin_shards("bytes", tmp_path / "data") == out


def test_a_process_that_comes_second_uses_the_first_one_s_shards(tmp_path, monkeypatch):
    rename, before = os.rename, {}

    def rename_second(source, target):
        if Path(target) == tmp_path / "out" and not before:
            before.update(started=True)
            prepare_builtin(tmp_path / "out")
            before.update({p.name: p.stat().st_ino for p in (tmp_path / "out").iterdir()})
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_second)
    prepare_builtin(tmp_path / "out")
    assert {p.name: p.stat().st_ino for p in (tmp_path / "out").iterdir()} | {"started": True} == before
    assert os.listdir(tmp_path) == ["out"]


def test_several_processes_may_prepare_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=prepare_builtin, args=(tmp_path / "out",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and os.listdir(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == contents(prepare_builtin(tmp_path / "once"))
