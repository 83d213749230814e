"""A data directory is there whole or not at all, says what it was made of, and holds the tokens of the whole text."""

import errno
import functools
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.data import tokenizer
from gpt2_triton.data.prepare import shard_writer
from gpt2_triton.data.prepare import text as text_module
from gpt2_triton.data.prepare.documents import find_sources, pieces, read
from gpt2_triton.data.prepare.text import builtin_shards, builtin_text, prepare_builtin, prepare_text
from gpt2_triton.data.shards import open_shards
from gpt2_triton.data.tokenizer import GPT2Tokenizer
from gpt2_triton.errors import DataError

SHAKESPEARE = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare.txt"
TEXT = "".join(f"line {i}: \N{GREEK SMALL LETTER PI} is {22 / 7 + i:.3f}\n" for i in range(200))


@functools.cache
def gpt2():
    """GPT-2's tokenizer from the installed files: no test waits for a network."""
    return GPT2Tokenizer(tokenizer._encoding(tokenizer._ranks_from_merges()))


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
    monkeypatch.setattr(shard_writer, "get_tokenizer", lambda name: gpt2())
    lines = []
    out = prepare_text([SHAKESPEARE], tmp_path / "out", "gpt2", progress=lines.append)
    assert [len(tokens_of(out, split)) for split in ("train", "val")] == [301_966, 36_059]
    done = [line for line in lines if line.startswith("100%")]
    assert "100% of 1,115,394 characters, 338,025 tokens" in done[0] and done[0].endswith("tokens/s")


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


@pytest.mark.parametrize("shard_tokens", [700, 1000, 1234])
def test_no_shard_is_too_long_and_none_too_short(tmp_path, text_file, shard_tokens, monkeypatch):
    monkeypatch.setattr(shard_writer, "PIECE", 50)  # many parts, none of which ends with a shard
    out = prepare_text([text_file], tmp_path / "out", "bytes", shard_tokens=shard_tokens)
    whole = prepare_text([text_file], tmp_path / "whole", "bytes")
    *full, last, end = [len(s.tokens) for s in open_shards(str(out / "train_*.bin"), 256, 4)]
    assert len(full) > 1 and set(full) == {shard_tokens}
    assert shard_tokens >= last >= end >= shard_tokens // 2
    for split in ("train", "val"):
        np.testing.assert_array_equal(tokens_of(out, split), tokens_of(whole, split))


def test_a_last_shard_that_is_just_full_stays_whole(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 40)
    out = prepare_text([tmp_path / "a.txt"], tmp_path / "out", "bytes", val_fraction=0.5, shard_tokens=5)
    assert [len(s.tokens) for s in open_shards(str(out / "train_*.bin"), 256, 4)] == [5, 5, 5, 5]


SPACES = "\n \t\r\f\x1c\x85\xa0\N{LINE SEPARATOR}\N{IDEOGRAPHIC SPACE}"


@given(
    given=st.lists(st.text(st.sampled_from("a'sé1.\N{GRINNING FACE}" + SPACES), min_size=1, max_size=30), max_size=4),
    size=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_pieces_have_the_tokens_of_the_whole(given, size):
    text, encode = "".join(given), gpt2().encode
    parts = list(pieces(given, size))
    assert parts == list(pieces([text], size))  # however it was read
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


def test_a_place_that_is_taken_is_refused_before_the_work(tmp_path, text_file):
    for place in (text_file, tmp_path):
        with pytest.raises(DataError, match="in use"):
            prepare_text([text_file], place, "bytes", progress=lambda line: pytest.fail(line))


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"au lait:\ncaf\xe9\n")
    for name, message in (
        ("missing.txt", "cannot read: got No such file"),
        ("empty.txt", "empty: got 0 characters, expected text"),
        ("latin.txt", "line 2: not UTF-8: got byte 0xe9, expected text in UTF-8; convert it with `iconv"),
    ):
        with pytest.raises(DataError, match=f"{name}[:,] {message}"):
            prepare_text([tmp_path / name], tmp_path / "out", "bytes")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 1.5])
def test_a_split_without_tokens_is_refused(tmp_path, text_file, fraction):
    with pytest.raises(DataError, match=f"val_fraction: an empty split: got {fraction} of"):
        prepare_text([text_file], tmp_path / "out", "bytes", val_fraction=fraction)


def test_a_full_disk_leaves_nothing(tmp_path, text_file, monkeypatch):
    def full(path, tokens):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_writer, "write_shard", full)
    with pytest.raises(DataError, match="out: cannot write: got No space left on device"):
        prepare_text([text_file], tmp_path / "out", "bytes")
    assert os.listdir(tmp_path) == ["input.txt"]


def _prepare_and_die(text_file, out):
    write = shard_writer.write_shard

    def write_shard(path, tokens):
        write(path, tokens)
        if path.name.startswith("val"):
            os.kill(os.getpid(), signal.SIGKILL)

    shard_writer.write_shard = write_shard
    prepare_text([text_file], out, "bytes")


def test_a_killed_preparation_shows_nothing_and_can_be_run_again(tmp_path, text_file):
    process = multiprocessing.get_context("spawn").Process(target=_prepare_and_die, args=(text_file, tmp_path / "out"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [p.name for p in tmp_path.glob("*") if not p.name.startswith(".")] == ["input.txt"]
    again = prepare_text([text_file], tmp_path / "out", "bytes")
    assert contents(again) == contents(prepare_text([text_file], tmp_path / "once", "bytes"))


# ---- kinds of files ----


def jsonl(*texts, **more):
    return "".join(json.dumps({"text": text} | more) + "\n" for text in texts).encode()


def test_files_folders_and_globs_give_the_same_documents_whatever_their_kind(tmp_path):
    """Four kinds of file, found in a folder in the order of their names, or by globs, or named one by one."""
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(jsonl("one\ntwo", "", "three", id=7) + b"\n")
    (folder / "b.txt").write_text("four\nfive")
    (folder / "sub" / "c.jsonl.gz").write_bytes(gzip.compress(jsonl("six", "\N{GREEK SMALL LETTER PI}")))
    (folder / "sub" / "d.txt.gz").write_bytes(gzip.compress(b"seven\r\neight"))
    (folder / ".hidden.txt").write_text("no")
    (folder / "notes.md").write_text("no")
    expected = "one\ntwo\0three\0four\nfive\0six\0\N{GREEK SMALL LETTER PI}\0seven\r\neight".encode()
    files = sorted(folder.rglob("[a-d].*"))
    for i, inputs in enumerate(([folder], [folder / "*.*l", folder / "b.txt", folder / "**" / "*.gz"], files)):
        out = prepare_text(inputs, tmp_path / str(i), "bytes", val_fraction=0.2)
        tokens = np.concatenate([tokens_of(out, split) for split in ("train", "val")])
        assert bytes(tokens.astype(np.uint8)) == expected
    record = json.loads((tmp_path / "0" / "shards.json").read_text())
    assert [row["file"] for row in record["source"]] == ["a.jsonl", "b.txt", "sub/c.jsonl.gz", "sub/d.txt.gz"]
    assert [row["sha256"] for row in record["source"]] == [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", "line 3: not JSON: got Expecting property name"),
        (b'["text"]', 'line 3: no string in field "text": got list, expected an object'),
        (b'{"id": 1, "body": ""}', 'line 3: no string in field "text": got the fields id, body'),
        (b'{"text": 5}', 'line 3: no string in field "text": got one of type int'),
        (b'{"text": "\\ud83d"}', r"line 3: half a surrogate pair: got .ud83d alone"),
        (b'{"text": "\xe9"}', "line 3: not UTF-8: got byte 0xe9"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_bad_line_is_named(tmp_path, line, message, suffix):
    data, path = jsonl("a") + b"\n" + line + b"\n" + jsonl("b"), tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    with pytest.raises(DataError, match=rf"x{suffix}, {message}") as error:
        prepare_text([path], tmp_path / "out", "bytes")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_damaged_gz_is_one_line(tmp_path):
    whole = gzip.compress(np.random.default_rng(0).integers(32, 127, 5000, np.uint8).tobytes())
    for name, data in (("cut", whole[:-900]), ("torn", whole[:500] + bytes(50) + whole[550:]), ("none", b"plain")):
        (tmp_path / f"{name}.txt.gz").write_bytes(data)
        with pytest.raises(DataError, match=f"{name}.txt.gz: cannot read: got .*; correct the path or copy"):
            prepare_text([tmp_path / f"{name}.txt.gz"], tmp_path / "out", "bytes")


def test_inputs_that_are_no_text_are_refused(tmp_path, text_file):
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.parquet").touch()
    for inputs, message in (
        (["folder"], "folder: no text here: got 0 files, expected names that end in"),
        (["mytext"], "mytext: cannot read: got No such file or directory, expected a file, a folder or a quoted glob"),
        (["none*.txt"], r"none\*.txt: no text here"),
        (["x.parquet"], "x.parquet: unknown kind of text: got x.parquet, expected names that end in .txt or .jsonl"),
        (["input.txt", "*.txt"], "input.txt: the same file again"),
    ):
        with pytest.raises(DataError, match=message):
            find_sources([tmp_path / given for given in inputs])


def test_a_large_file_is_read_in_parts(tmp_path):
    """Parts end with a line, and no more than READ_BYTES and a line are held."""
    (tmp_path / "x.txt").write_text("0123456789\n" * 300_000)
    parts = [text for _, text in read(tmp_path / "x.txt")]
    assert len(parts) == 4 and max(map(len, parts)) < (1 << 20) + 11 and all(part[-1] == "\n" for part in parts)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path, text_file, monkeypatch):
    def measure_and_append(path):
        row = measure(path)
        path.write_text(TEXT + "more")
        return row

    measure = text_module.measure
    monkeypatch.setattr(text_module, "measure", measure_and_append)
    with pytest.raises(DataError, match="it changed meanwhile: got .* leave the files alone"):
        prepare_text([text_file], tmp_path / "out", "bytes")
    assert os.listdir(tmp_path) == ["input.txt"]


# ---- several workers ----


def test_several_workers_write_the_bytes_of_one(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(*(TEXT[i : i + 211] for i in range(0, len(TEXT), 173))))
    (tmp_path / "b.txt").write_text(TEXT)
    files = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    monkeypatch.setattr(shard_writer, "PIECE", 500)
    one = prepare_text(files, tmp_path / "one", "bytes")
    assert contents(prepare_text(files, tmp_path / "two", "bytes", workers=2)) == contents(one)


def _die(path):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_one_line(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(shard_writer, "PIECE", 500)
    monkeypatch.setattr(text_module, "measure", _die)
    with pytest.raises(DataError, match="a worker died: .* try again with fewer --workers"):
        prepare_text([text_file], tmp_path / "out", "bytes", workers=2)


def test_work_that_takes_long_says_how_long(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(shard_writer, "PIECE", 500)
    monkeypatch.setattr(shard_writer, "REPORT_SECONDS", -1.0)  # every time
    lines = []
    prepare_text([text_file], tmp_path / "out", "bytes", progress=lines.append)
    assert lines[0] == f"read 1 of 1 files, {len(TEXT):,} characters"
    pattern = r" *\d+% of [\d,]+ characters, [\d,]+ tokens, [\d,]+ tokens/s, \d:\d\d:\d\d left"
    assert all(re.fullmatch(pattern, line) for line in lines[1:-2]) and len(lines) > 10
    assert lines[-2].startswith("100%") and lines[-1].endswith("out: 2 shards")


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
