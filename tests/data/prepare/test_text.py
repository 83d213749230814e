"""A data directory records its sources and holds the tokens of the whole text,
however often it was stopped.
"""

import errno
import functools
import gzip
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gpt2_triton.console import counted
from gpt2_triton.data import tokenizer
from gpt2_triton.data.prepare import build, documents, text
from gpt2_triton.data.prepare.workers import paired_map
from gpt2_triton.data.shards import map_tokens, open_shards
from gpt2_triton.data.tokenizer import GPT2Tokenizer, get_tokenizer
from gpt2_triton.errors import DataError
from tests.support.commands import run_tool
from tests.support.json_files import read_json

SHAKESPEARE = Path(__file__).parents[3] / "data" / "tinyshakespeare.txt"
TEXT = "".join(f"line {i}: \N{GREEK SMALL LETTER PI} is {22 / 7 + i:.3f}\n" for i in range(200))


@functools.cache
def gpt2():
    """GPT-2's tokenizer from the installed files: no test waits for a network."""
    return GPT2Tokenizer(tokenizer._installed_encoding())


def llama3():
    """Llama 3's tokenizer, if its vocabulary is installed."""
    try:
        return get_tokenizer("llama3")
    except DataError as error:
        pytest.skip(str(error))


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "input.txt").write_text(TEXT)
    return tmp_path / "input.txt"


def tokens_of(directory, *splits, vocab_size=50257):
    """Return the tokens of these splits, by default of both."""
    patterns = [f"{directory}/{split}_*.bin" for split in splits or ("train", "val")]
    shards = [shard for pattern in patterns for shard in open_shards(pattern, vocab_size, 4)]
    return np.concatenate([map_tokens(shard.path) for shard in shards])


def text_of(directory, *splits):
    """Return the text of tokens that are bytes."""
    return bytes(tokens_of(directory, *splits).astype(np.uint8))


def prepare_text(inputs, out, tokenizer="bytes", val_fraction=0.1, workers=1, **options):
    return text.prepare_text(
        text.measure_text(inputs, workers), out, tokenizer, val_fraction, workers, **options
    )


def checked_record(directory):
    """Return the record of shards after a comparison of its rows with them."""
    record = read_json(directory / "shards.json")
    for name, row in record["shards"].items():
        data = (directory / name).read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        assert row == {"tokens": (len(data) - 1024) // 2, "sha256": sha256}
    return record


def require_refused(message, *arguments, **options):
    with pytest.raises(DataError, match=message):
        prepare_text(*arguments, **options)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_text_tinyshakespeare_has_the_known_token_counts(tmp_path, monkeypatch):
    if not SHAKESPEARE.exists():
        pytest.skip(f"{SHAKESPEARE} is not there")
    monkeypatch.setattr(build, "get_tokenizer", lambda name: gpt2())
    out = prepare_text([SHAKESPEARE], tmp_path / "out", "gpt2")
    assert [len(tokens_of(out, split)) for split in ("train", "val")] == [301_966, 36_059]


def test_text_is_split_by_characters_and_recorded(tmp_path, text_file):
    out = prepare_text([text_file], tmp_path / "a" / "out", val_fraction=0.25)
    cut = int(len(TEXT) * 0.75)
    assert text_of(out, "train").decode() == TEXT[:cut]
    assert text_of(out, "val").decode() == TEXT[cut:]
    record = checked_record(out)
    assert record["source"] == [
        {"file": "input.txt", "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    ]
    assert (record["tokenizer"], record["val_fraction"]) == ("bytes", 0.25)
    assert sorted(record["shards"]) == ["train_000000.bin", "val_000000.bin"]
    assert sorted(os.listdir(tmp_path / "a")) == ["out"] and os.stat(out).st_mode & 0o777 == 0o755


def test_text_documents_are_separated_by_end_of_text(tmp_path, monkeypatch):
    """Once, however many pieces a document has."""
    monkeypatch.setattr(build, "BATCH_CHARS", 2)
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for file, letters in zip(files, ("aa aa", "bb bb", "ccc ccc cc"), strict=True):
        file.write_text(letters)
    out = prepare_text(files, tmp_path / "out", val_fraction=0.6)
    assert text_of(out, "train") == b"aa aa\0bb "
    assert text_of(out, "val") == b"bb\0ccc ccc cc"


def test_a_line_names_the_files_that_validation_judges(tmp_path, capsys):
    files = [tmp_path / f"{i}.txt" for i in range(4)]
    for file, letters in zip(files, ("a" * 70, "b" * 10, "c" * 10, "d" * 10), strict=True):
        file.write_text(letters)
    judged = {0.1: "1 of 4 files, from 3.txt on", 0.15: "2 of 4 files, from 2.txt on", 0.4: ""}
    for fraction, said in judged.items():
        out = prepare_text(files, tmp_path / str(fraction), val_fraction=fraction)
        notes = [line for line in capsys.readouterr().out.splitlines() if "note: valid" in line]
        assert len(notes) == bool(said) and said in "".join(notes)
        validated = {*text_of(out, "val").decode()} - {"\0"}
        assert len(validated) == int(said[:1] or 4)
    prepare_text(files[:1], tmp_path / "one", "bytes")
    assert "note: " not in capsys.readouterr().out


@pytest.mark.parametrize("shard_tokens", [700, 1000, 1234])
def test_text_shards_are_neither_too_long_nor_too_short(
    tmp_path, text_file, shard_tokens, monkeypatch
):
    monkeypatch.setattr(build, "BATCH_CHARS", 50)  # many parts, none of which ends with a shard
    out = prepare_text([text_file], tmp_path / "out", shard_tokens=shard_tokens)
    whole = prepare_text([text_file], tmp_path / "whole")
    *full, last, end = [s.count for s in open_shards(str(out / "train_*.bin"), 256, 4)]
    assert len(full) > 1 and set(full) == {shard_tokens}
    assert shard_tokens >= last >= end >= shard_tokens // 2
    is_short = 2 * ((last + end) % shard_tokens) < shard_tokens
    assert is_short == (last < shard_tokens)
    for split in ("train", "val"):
        np.testing.assert_array_equal(tokens_of(out, split), tokens_of(whole, split))


def test_text_prepared_already_is_left_alone(tmp_path, text_file, monkeypatch, capsys):
    """Also on a file system that is read-only by now."""
    out = prepare_text([text_file], tmp_path / "out")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: _fail("Read-only file system"))
    before = {p.name: p.stat().st_ino for p in out.iterdir()}
    assert prepare_text([text_file], tmp_path / "out") == out
    assert {
        p.name: p.stat().st_ino for p in out.iterdir()
    } == before and "already" in capsys.readouterr().out


def test_text_never_overwrites_other_data(tmp_path, text_file):
    out = prepare_text([text_file], tmp_path / "out")
    before = contents(out)
    require_refused("out: in use: it holds other data; .*--out", [text_file], out, val_fraction=0.2)
    assert contents(out) == before and sorted(os.listdir(tmp_path)) == ["input.txt", "out"]
    (out / "val_000000.bin").write_bytes(b"cut off")
    require_refused("in use", [text_file], out)


def test_text_refuses_files_that_are_not_text(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"au lait:\ncaf\xe9\n")
    (tmp_path / "lfs.txt").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
    )
    for name, message in (
        ("missing.txt", "no such file; give"),
        ("empty.txt", ".*no text, but empty files: 1, first .*empty.txt; give files with text"),
        (
            "latin.txt",
            r"line 2: not UTF-8: byte 0xe9; `iconv -f ENCODING -t utf-8 "
            r".*latin.txt > NEW` converts it",
        ),
        ("lfs.txt", "a pointer of Git LFS, not the text; `git lfs pull` "),
    ):
        require_refused(f"{name}[:,]? ?{message}", [tmp_path / name], tmp_path / "out")
    (tmp_path / "cut.jsonl").write_text("{")
    require_refused(
        "cut.jsonl, line 1: not JSON: .*\n.*latin.txt, line 2: not UTF-8: ",
        [tmp_path],
        tmp_path / "out",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 1.5])
def test_text_refuses_an_empty_split(tmp_path, text_file, fraction):
    require_refused(
        f"val_fraction: an empty split: {fraction} of",
        [text_file],
        tmp_path / "out",
        val_fraction=fraction,
    )


# ---- stopping and resuming ----


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Two files of several documents, the second cut by the split, and what an unbroken
    preparation makes of them.
    """
    directory = tmp_path_factory.mktemp("many")
    (directory / "a.jsonl").write_bytes(
        jsonl(*(TEXT[i : i + 211] for i in range(0, len(TEXT), 173)))
    )
    (directory / "b.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BATCH_CHARS", 500)
        unbroken = contents(prepare_many(directory, directory / "out"))
    trained, validated = (
        sum(name.startswith(split) for name in unbroken) for split in ("train", "val")
    )
    assert trained > 4 and validated > 2
    return directory, unbroken


def prepare_many(directory, out, workers=1):
    files = [directory / "a.jsonl", directory / "b.txt"]
    return prepare_text(files, out, val_fraction=0.4, workers=workers, shard_tokens=1300)


class Stop(Exception):
    pass


def stop_at(patch, count, after):
    """Stop before or after progress.json is written with so many shards."""
    record = build._record_progress

    def stop_there(out_dir, recipe, shards, places):
        if len(shards) < count or after:
            record(out_dir, recipe, shards, places)
        if len(shards) >= count:
            raise Stop

    patch.setattr(build, "_record_progress", stop_there)


@pytest.mark.parametrize("after", [False, True])
def test_text_stopped_at_any_shard_resumes_to_the_same_bytes(
    many, tmp_path, monkeypatch, capsys, after
):
    """Before or after each write of progress.json; without it, a shard
    is left that no record has.
    """
    out = tmp_path / "out"
    directory, unbroken = many
    monkeypatch.setattr(build, "BATCH_CHARS", 500)
    for count in range(1, len(unbroken) - 1):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_at(patch, count, after)
            prepare_many(directory, out)
        assert not (out / "shards.json").exists()
    assert contents(prepare_many(directory, out, workers=2)) == unbroken
    finished = counted(len(unbroken) - 2 - (not after), "finished shard")
    assert f"resuming after {finished}, " in capsys.readouterr().out


def test_text_that_was_begun_is_not_continued_with_other_text(many, tmp_path, monkeypatch):
    directory, out = many[0], tmp_path / "out"
    monkeypatch.setattr(build, "BATCH_CHARS", 500)
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match="out: cannot write: No space left; make room$"),
    ):
        patch.setattr(build, "balance_last_two", lambda *_: _fail("No space left"))
        prepare_many(directory, out)
    before = contents(out)
    require_refused(
        "out: begun with another source: .*; give that again, remove the directory",
        [directory / "b.txt"],
        out,
        val_fraction=0.4,
        shard_tokens=1300,
    )
    assert contents(out) == before


def _fail(reason):
    raise OSError(errno.ENOSPC, reason)


# ---- kinds of files ----


def jsonl(*texts, **more):
    return "".join(json.dumps({"text": text} | more) + "\n" for text in texts).encode()


def test_text_reads_files_folders_and_globs_alike(tmp_path):
    """Four kinds of file, found in a folder in the order of their names, or by
    globs, or named one by one.
    """
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(jsonl("one\ntwo", "", "three", id=7) + b"\n")
    (folder / "b.txt").write_text("four\nfive")
    (folder / "sub" / "c.jsonl.gz").write_bytes(
        gzip.compress(jsonl("six", "\N{GREEK SMALL LETTER PI}"))
    )
    (folder / "sub" / "d.txt.gz").write_bytes(gzip.compress(b"seven\r\neight"))
    (folder / ".hidden.txt").write_text("no")
    (folder / "notes.py").write_text("no")
    expected = "one\ntwo\0three\0four\nfive\0six\0\N{GREEK SMALL LETTER PI}\0seven\neight".encode()
    files = sorted(folder.rglob("[a-d].*"))
    for i, inputs in enumerate(
        ([folder], [folder / "*.*l", folder / "b.txt", folder / "**" / "*.gz"], files)
    ):
        out = prepare_text(inputs, tmp_path / str(i), val_fraction=0.2)
        assert text_of(out) == expected
    record = read_json(tmp_path / "0" / "shards.json")
    assert [row["file"] for row in record["source"]] == [
        "a.jsonl",
        "b.txt",
        "sub/c.jsonl.gz",
        "sub/d.txt.gz",
    ]
    assert [row["sha256"] for row in record["source"]] == [
        hashlib.sha256(f.read_bytes()).hexdigest() for f in files
    ]


@pytest.mark.parametrize("line, message", [
    (b"{", "line 3: not JSON: Expecting property name"),
    (b'{"text": "\xe9"}', "line 3: not UTF-8: byte 0xe9"),
])  # fmt: skip
def test_text_names_a_bad_line(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl("a") + b"\n" + line + b"\n" + jsonl("b"))
    with pytest.raises(DataError, match=rf"x.jsonl, {message}") as error:
        prepare_text([path], tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_text_refuses_a_damaged_gz(tmp_path):
    whole = gzip.compress(np.random.default_rng(0).integers(32, 127, 5000, np.uint8).tobytes())
    for name, data in (
        ("cut", whole[:-900]),
        ("torn", whole[:500] + bytes(50) + whole[550:]),
        ("none", b"plain"),
    ):
        (tmp_path / f"{name}.txt.gz").write_bytes(data)
        require_refused(
            f"{name}.txt.gz: cannot read: .*; correct the path or copy",
            [tmp_path / f"{name}.txt.gz"],
            tmp_path / "out",
        )


def test_input_that_cannot_be_opened_is_refused(tmp_path, monkeypatch):
    """Text in the place of a path, and code, whose ending does not say that it is text."""
    require_refused(
        "wordword: cannot read: File name too long; correct the",
        [Path("word" * 100)],
        tmp_path / "out",
    )
    path = tmp_path / "x.py"
    path.write_text("pass")

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(documents, "open", refuse, raising=False)
    require_refused("x.py: cannot read: Permission denied; correct the", [path], tmp_path / "out")


def test_text_changed_after_measuring_is_refused(tmp_path, text_file, monkeypatch):
    def measure_and_append(place, how, step):
        row = measure(place, how, step)
        place[0].write_text(TEXT + "more")
        return row

    measure = documents.measure
    monkeypatch.setattr(documents, "measure", measure_and_append)
    require_refused("it changed meanwhile: .* start again", [text_file], tmp_path / "out")


# ---- several workers ----


def test_text_workers_write_the_bytes_of_one(many, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BATCH_CHARS", 500)
    assert contents(prepare_many(many[0], tmp_path / "two", workers=2)) == many[1]


def _die(place, how, step):
    os.kill(os.getpid(), signal.SIGKILL)


def test_text_worker_that_dies_is_one_line(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(build, "BATCH_CHARS", 500)
    monkeypatch.setattr(documents, "measure", _die)
    require_refused(
        "one of 2 workers died, .*; try again with fewer --workers",
        [text_file],
        tmp_path / "out",
        workers=2,
    )


def test_text_workers_end_before_a_second_ctrl_c_counts():
    with pytest.raises(KeyboardInterrupt), paired_map(2) as run:
        for _ in run(time.sleep, [0, 1, 1]):
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
            raise KeyboardInterrupt
    assert not multiprocessing.active_children()


def _blocked(_):
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_text_workers_leave_a_ctrl_c_to_the_parent_from_their_start_on():
    with paired_map(2) as run:
        for _, in_worker in run(_blocked, [0]):
            assert signal.SIGINT in in_worker
    assert signal.SIGINT not in _blocked(0)


# ---- what people mean ----


def test_text_command_reads_a_field_says_what_it_left_out_and_is_strict(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [{"doc": {"text": f"<|endoftext|>line {i}\0\r\n"}} for i in range(50)] + [{"doc": {}}]
    Path("c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("empty.txt").touch()
    command = "prepare text c.jsonl empty.txt --tokenizer bytes --workers 1"
    of_field = f"{command} --field doc.text --out"
    assert run_tool(f"{command} --out out") == 3
    assert 'c.jsonl, line 1: {"doc": {"text": "<|endoftext|>line 0' in capsys.readouterr().err
    assert run_tool(f"{of_field} out --strict") == 3 and not Path("out").exists()
    what = 'rows without text in the field doc.text: 1, first c.jsonl, line 51: {"doc": {}}; '
    what += "empty files: 1, first empty.txt"
    nuls = "NUL characters: 50, first c.jsonl, line 1; "
    assert f"--strict: would leave out {nuls}{what}; correct" in capsys.readouterr().err
    assert run_tool(f"{of_field} out") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["special tokens: <|endoftext|> 50", f"left out: {nuls}{what}"]
    assert text_of("out") == "\0".join(f"line {i}\n" for i in range(50)).encode()
    # the shards mean other text
    assert run_tool(f"{of_field} out --no-special") == 3
    assert "out: in use" in capsys.readouterr().err
    assert run_tool(f"{of_field} plain --no-special") == 0
    assert b"<|endoftext|>line 7\n" in text_of("plain", "train")


@pytest.mark.parametrize(
    "sentence",
    [
        "the boy went home and saw a big dog. ",
        "мальчик пошёл домой и увидел собаку. ",
        "猫在树下睡觉，孩子们去河边玩水。",
    ],
)
def test_tokens_are_counted_in_every_script(tmp_path, monkeypatch, sentence):
    """Of a short text each; of a longer one from pieces that lie in all its
    parts, whatever its files.
    """
    monkeypatch.setattr(build, "get_tokenizer", lambda name: gpt2())
    monkeypatch.setattr(text, "get_tokenizer", lambda name: gpt2())
    (tmp_path / "a.txt").write_text(sentence * 2000)
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": sentence.upper()}) + "\n" for _ in range(2000))
    )
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    exact = len(gpt2().encode(sentence * 2000)) + 2000 * len(gpt2().encode(sentence.upper()))
    assert text.measure_text(files, 1).count_tokens("gpt2") == pytest.approx(exact, rel=0.003)
    monkeypatch.setattr(text, "SAMPLE_CHARS", sum(file.stat().st_size for file in files) // 4)
    thin = text.measure_text(files, 1)
    assert sum(map(len, thin.sample)) < thin.characters / 2
    assert thin.count_tokens("gpt2") == pytest.approx(exact, rel=0.1)


def test_a_sample_has_the_beginning_of_each_step_across_texts():
    whole = "".join(chr(256 + i % 5000) for i in range(50_000))
    for size in (1, 700, 5000, 50_000):
        texts = [whole[i : i + size] for i in range(0, len(whole), size)]
        pieces = [
            piece
            for i, part in enumerate(texts)
            for piece in documents._thinned(part, i * size, 3 * documents.PIECE)
        ]
        starts = range(0, len(whole), 3 * documents.PIECE)
        assert "".join(pieces) == "".join(
            whole[start : start + documents.PIECE] for start in starts
        )


CHAT = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat eats grass %d?<|eot_id|>"
CHAT_WITH = (
    "special tokens: <|begin_of_text|> 60, <|end_header_id|> 60, "
    "<|eot_id|> 60, <|start_header_id|> 60"
)


@pytest.mark.parametrize("name", ["c.jsonl", "c.txt"])
def test_text_in_a_chat_format_has_its_special_tokens_and_a_line_that_counts_them(
    tmp_path, monkeypatch, capsys, name
):
    """Also where the end of the training data would fall into one; none of
    them doubles the delimiter.
    """
    coder = llama3()
    monkeypatch.chdir(tmp_path)
    turns = [CHAT % i for i in range(60)]
    Path(name).write_text(
        "".join(json.dumps({"text": turn}) + "\n" for turn in turns)
        if "js" in name
        else "".join(turns)
    )
    for fraction in (0.1, 0.1005, 0.101):
        command = f"prepare text {name} --tokenizer llama3 --workers 1 --val_fraction {fraction}"
        assert run_tool(f"{command} --out {fraction}") == 0
        assert capsys.readouterr().out.startswith(CHAT_WITH + "\n")
        assert tokens_of(fraction, vocab_size=coder.vocab_size).tolist() == [
            token for turn in turns for token in coder.encode(turn, special=True)
        ]
    assert run_tool(f"{command} --out plain --no-special") == 0
    assert "special" not in capsys.readouterr().out
    plain = map_tokens(Path("plain", "train_000000.bin"))
    assert set(plain[plain >= 128000]) <= {coder.delimiter}


def test_markup_that_a_tokenizer_does_not_know_is_counted_as_ordinary_text(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("<|im_start|>user\nhello<|im_end|>\n<|endoftext|>" * 20)
    prepare_text([tmp_path / "x.txt"], tmp_path / "out")
    out = capsys.readouterr().out
    assert "special tokens: <|endoftext|> 20\n" in out
    assert "ordinary text, no special tokens of bytes: <|im_end|> 20, <|im_start|> 20\n" in out


def test_shards_of_an_earlier_version_stay_valid_unless_the_text_has_special_tokens(tmp_path):
    """Then only <|endoftext|> was a token."""
    records = {}
    for name, content in (("plain", "a<|endoftext|>b" * 50), ("chat", CHAT * 50)):
        (tmp_path / f"{name}.txt").write_text(content)
        measured = text.measure_text([tmp_path / f"{name}.txt"], 1)
        out = text.prepare_text(
            measured, tmp_path / name, "gpt2" if name == "plain" else "llama3", 0.1, 1
        )
        records[name] = read_json(out / "shards.json")
    assert "special" not in records["plain"] and records["chat"]["special"]["<|eot_id|>"] == 50
