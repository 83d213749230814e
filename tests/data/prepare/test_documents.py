"""Text files as documents: which files, what is in them, pieces with the tokens of the whole."""

import bz2
import gzip
import json
import lzma
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.data.prepare import documents
from gpt2_triton.data.prepare.documents import (
    AS_DOCUMENTS,
    Reading,
    find_files,
    left_out,
    read,
    split_at_whitespace,
)
from gpt2_triton.errors import DataError
from tests.data.prepare.test_text import gpt2, llama3

SPACES = "\n \t\r\f\x1c\x85\xa0\N{LINE SEPARATOR}\N{IDEOGRAPHIC SPACE}"


@pytest.mark.parametrize("tokenizer", [gpt2, llama3])
@given(
    given=st.lists(
        st.text(st.sampled_from("a'sé1.\N{GRINNING FACE}" + SPACES), min_size=1, max_size=30),
        max_size=4,
    ),
    size=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_split_at_whitespace_keeps_the_tokens(tokenizer, given, size):
    text, encode = "".join(given), tokenizer().encode
    parts = list(split_at_whitespace(given, size))
    assert parts == list(split_at_whitespace([text], size))  # however it was read
    assert "".join(parts) == text and all(len(part) >= size for part in parts[:-1])
    assert [t for part in parts for t in encode(part)] == encode(text).tolist()


def texts_of(path, how=AS_DOCUMENTS):
    """The texts of a file, and the notes."""
    notes = {}
    return [text for _, text in read(path, how, notes)], notes


# ---- which files ----


def test_find_files_refuses_what_is_not_text(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.pdf").write_bytes(b"%PDF-1.7\0")
    for name, message in (
        ("folder", "folder: no text; give .* text has names that end in .txt, .md"),
        ("mytext", "mytext: no such file; give a file, a folder or a quoted glob"),
        ("none*.txt", r"none\*.txt: no such file"),
        ("x.pdf", "x.pdf: no text; .* text has names that end in"),
    ):
        with pytest.raises(DataError, match=message):
            find_files([tmp_path / name])


def test_folder_gives_each_readable_file_once_and_counts_the_others(tmp_path):
    """Through links to files and folders, a loop, names of splits; without
    hidden files and our output.
    """
    inside, outside = tmp_path / "in", tmp_path / "out"
    names = ["A.TXT", "README.md", "test.txt", "train.txt", "sub/v.JSONL.GZ", "x.parquet"]
    names += ["user/metrics.jsonl", "user/progress.json", "progress.json"]
    others = [
        "a.pdf",
        "sub/b.c",
        "sub/none",
        ".git/x.txt",
        ".hidden.txt",
        "run/metrics.jsonl",
        "run/a.json",
    ]
    others += ["data/shards.json", "data/a.json"]
    others += ["model/config.json", "model/generation_config.json", "model/merges.txt"]
    for name in names + others:
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).touch()
    (inside / "run" / "config.yaml").touch()
    (inside / "data" / "shards.json").write_text('{"shards": {}}')
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "far.txt").touch()
    os.symlink(outside, inside / "link")
    os.symlink(inside, outside / "deep" / "back")
    os.symlink(inside / "train.txt", inside / "again.txt")
    os.symlink(inside / "gone", inside / "gone.txt")
    files, notes = find_files([inside, inside / "*.txt"])
    found = sorted([*names, "again.txt", "link/deep/far.txt"])
    found.remove("train.txt")  # the same file as again.txt, which is first
    assert sorted(file.name for file in files) == sorted(found)
    twice, others = left_out(notes).split("; ")
    assert twice.endswith(f"twice: 4, first {inside}/train.txt")
    kinds = "(.c, .pdf, .txt, no ending), not given by their ending"
    assert others.endswith(f"{kinds}: 4, first {inside}/a.pdf")


def test_a_run_in_the_folder_of_its_text_adds_nothing_to_it(tmp_path):
    step = tmp_path / "checkpoints" / "step_00000001"
    step.mkdir(parents=True)
    written = ["config.yaml", "metrics.jsonl", "run.json", "stats.jsonl"]
    written += [f"{step}/{name}" for name in ("manifest.json", "state.json")]
    for name in ("book.txt", *written):
        (tmp_path / name).touch()
    assert [file.name for file in find_files([tmp_path])[0]] == ["book.txt"]


def test_a_file_of_another_kind_is_text_by_its_name_or_its_ending(tmp_path, capsys):
    """As code is: in a folder, or by a glob without an ending, it is counted as left out."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a = 1\n")
    (tmp_path / "src" / "b.md").write_text("b")
    (tmp_path / "src" / "bytes.py").write_bytes(b"\1\0")
    (tmp_path / "Makefile").write_text("all:\n")
    files, notes = find_files([tmp_path / "**" / "*.py", tmp_path / "Makefile"])
    assert [file.name for file in files] == ["a.py", "Makefile"]
    assert "(.py), not given by their ending: 1, first" in left_out(notes)  # bytes.py
    shown = capsys.readouterr().out
    assert shown == f"read as plain text: .py, no ending: 2, first {files[0].path}\n"
    assert texts_of(files[0].path) == (["a = 1\n"], {})
    for source in (tmp_path / "src", tmp_path / "src" / "*"):
        files, notes = find_files([source])
        assert [file.name for file in files] == ["b.md"]
        assert "(.py), not given by their ending: 2, first" in left_out(notes)


# ---- what is in them ----


@pytest.mark.parametrize(
    "ending, opener",
    [("", open), (".gz", gzip.open), (".BZ2", bz2.open), (".xz", lzma.open), (".zst", None)],
)
@pytest.mark.parametrize("kind", [".txt", ".md", ".jsonl", ".json"])
def test_read_opens_every_kind_and_compression(tmp_path, kind, ending, opener):
    text = "one\n\N{GREEK SMALL LETTER PI}\n" * 3
    data = (json.dumps({"text": text}) + "\n" if "js" in kind else text).encode()
    path = tmp_path / f"x{kind}{ending}"
    if opener:
        with opener(path, "wb") as file:
            file.write(data)
    else:  # two frames, as pzstd writes them
        path.write_bytes(
            b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (data[:9], data[9:]))
        )
    assert "".join(texts_of(path)[0]) == text
    if opener is not open:
        path.write_bytes(path.read_bytes()[:-7])
        with pytest.raises(DataError, match=f"x{kind}{ending}.*: cannot read: "):
            texts_of(path)


def test_read_finds_the_field_in_rows_of_every_kind(tmp_path):
    values = [{"text": "a\nb"}, None, {"text": 5}, {"text": ""}, {"text": "c"}]
    rows = [{"doc": value} for value in values]
    (tmp_path / "lines.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "indented.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "object.json").write_text(json.dumps(rows[0], indent=1))
    pq.write_table(
        pa.Table.from_pylist([row for row in rows if row != rows[2]]), tmp_path / "x.parquet"
    )
    for name, count, first in (
        ("lines.jsonl", 3, "line 3"),
        ("lines.json", 3, "line 2"),
        ("list.json", 3, "row 2"),
        ("indented.json", 3, "row 2"),
        ("x.parquet", 2, "row 2"),
    ):
        texts, notes = texts_of(tmp_path / name, Reading("doc.text"))
        assert texts == ["a\nb", "c"], name
        what = (
            f"rows without text in the field doc.text: {count}, first {tmp_path / name}, {first}: "
        )
        assert left_out(notes) == what + '{"doc": null}', name
    assert texts_of(tmp_path / "object.json", Reading("doc.text")) == (["a\nb"], {})
    # as pandas names it
    pq.write_table(pa.table({"id": [1], "doc.text": ["flat"]}), tmp_path / "flat.parquet")
    assert texts_of(tmp_path / "flat.parquet", Reading("doc.text")) == (["flat"], {})


def test_a_row_may_be_a_text_and_a_value_several_lines(tmp_path):
    """Lists of texts, texts in lines, and objects as jq prints them, one after the other."""
    rows, texts = [{"text": "a\nb"}, {"text": "c {"}], ["a\nb", "c {"]
    forms = {
        "list.json": json.dumps(texts), "indented.json": json.dumps(texts, indent=2),
        "lines.json": "\n".join(map(json.dumps, texts)),
        "lines.jsonl": "\n".join(map(json.dumps, texts)),
        "jq.json": "\n".join(json.dumps(row, indent=2) for row in rows),
        "lists.jsonl": json.dumps(rows),
    }  # fmt: skip
    for name, content in forms.items():
        (tmp_path / name).write_text(content)
        assert texts_of(tmp_path / name) == (texts, {}), name
    (tmp_path / "jq.json").write_text(forms["jq.json"] + "\n}")
    with pytest.raises(
        DataError, match="jq.json, line 7: not JSON: Expecting value; correct or remove this row"
    ):
        texts_of(tmp_path / "jq.json")


def test_half_characters_are_left_out_with_a_count(tmp_path):
    (tmp_path / "x.jsonl").write_text(
        '{"text": "cut \\ud83d"}\n{"text": "\\ud83d\\ude00 \\ude00"}\n{"text": "\\ud83d"}\n'
    )
    texts, notes = texts_of(tmp_path / "x.jsonl")
    assert texts == ["cut ", "\N{GRINNING FACE} "]
    assert left_out(notes) == f"half characters: 3, first {tmp_path / 'x.jsonl'}, line 1"


@pytest.mark.parametrize("content", ['{"text": "a"}'.encode("utf-16"), b"ok\ncaf\xe9"])
def test_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path, content):
    path = tmp_path / "x.md"
    path.write_bytes(content)
    command = f"iconv -f ENCODING -t utf-8 {path} > NEW"
    with pytest.raises(DataError, match=f"not UTF-8: byte 0x.*; `{command}` converts"):
        texts_of(path)


def test_a_zst_of_a_long_window_is_refused_with_the_command_that_unpacks_it(tmp_path):
    block = (4 << 3 | 1).to_bytes(3, "little") + b"text"
    header = bytes.fromhex("28b52ffd") + bytes([0, (31 - 10) << 3])  # a window of 2^31 bytes
    (tmp_path / "x.txt.zst").write_bytes(header + block)
    with pytest.raises(
        DataError,
        match="x.txt.zst: cannot read: .*; `zstd -d --long=31 FILE` unpacks it; give the unp",
    ):
        texts_of(tmp_path / "x.txt.zst")


def test_rows_of_another_field_are_refused_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_ROWS_WITHOUT_TEXT", 20)
    (tmp_path / "x.jsonl").write_text('{"content": "abc"}\n' * 20 + "no JSON")
    with pytest.raises(
        DataError,
        match='rows without .*: 20, .*{"content": "abc"}; .* --field NAME, or write ."text"',
    ):
        texts_of(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text('{"text": "abc"}\n' + '{"content": "abc"}\n' * 30)
    assert texts_of(tmp_path / "x.jsonl")[0] == ["abc"]


def test_end_of_text_windows_lines_and_nul_mean_what_they_say(tmp_path):
    raw = "<|endoftext|>one\r\ntwo\0\n<|endoftext|>\r\nthree\r<|endoftext|><|endoftext|>"
    (tmp_path / "x.txt").write_bytes(raw.encode())
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": raw}))
    for name in ("x.txt", "x.jsonl"):
        notes = {}
        parts = list(read(tmp_path / name, AS_DOCUMENTS, notes))
        assert [text for _, text in parts] == ["one\ntwo\n", "\nthree\r"] and len(
            {n for n, _ in parts}
        ) == 2
        assert documents.markup(notes) == {"<|endoftext|>": 4}
        assert left_out(notes).startswith(f"NUL characters: 1, first {tmp_path / name}, line")
        assert texts_of(tmp_path / name, Reading(endoftext=False))[0] == [
            raw.replace("\r\n", "\n").replace("\0", "")
        ]


def test_read_yields_a_large_file_in_parts(tmp_path):
    """Parts end with a line and have at most READ_BYTES and a line."""
    (tmp_path / "x.txt").write_text("0123456789\n" * 300_000)
    (number, _), *_ = parts = list(read(tmp_path / "x.txt", AS_DOCUMENTS, {}))
    assert len(parts) == 4 and {n for n, _ in parts} == {number}
    assert max(len(text) for _, text in parts) < (1 << 20) + 11 and all(
        text[-1] == "\n" for _, text in parts
    )


def test_byte_order_mark_is_left_out(tmp_path):
    for name, content in (
        ("x.txt", "text"),
        ("x.jsonl", '{"text": "text"}\n{"text": "\ufeffmore"}\n'),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert texts_of(tmp_path / "x.txt")[0] == ["text"]
    assert texts_of(tmp_path / "x.jsonl")[0] == ["text", "\ufeffmore"]
