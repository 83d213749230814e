"""Text files as documents: which files, what is in them, pieces with the tokens of the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.data.prepare.documents import find_files, read, split_at_whitespace
from gpt2_triton.errors import DataError
from tests.data.prepare.test_text import gpt2

SPACES = "\n \t\r\f\x1c\x85\xa0\N{LINE SEPARATOR}\N{IDEOGRAPHIC SPACE}"


@given(
    given=st.lists(st.text(st.sampled_from("a'sé1.\N{GRINNING FACE}" + SPACES), min_size=1, max_size=30), max_size=4),
    size=st.integers(1, 5),
)
@settings(max_examples=300, deadline=None)
def test_split_at_whitespace_keeps_the_tokens(given, size):
    text, encode = "".join(given), gpt2().encode
    parts = list(split_at_whitespace(given, size))
    assert parts == list(split_at_whitespace([text], size))  # however it was read
    assert "".join(parts) == text and all(len(part) >= size for part in parts[:-1])
    assert [t for part in parts for t in encode(part)] == encode(text).tolist()


def test_find_files_refuses_what_is_not_text(tmp_path):
    (tmp_path / "input.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.parquet").touch()
    for inputs, message in (
        (["folder"], "folder: no text here; text has names that end in"),
        (["mytext"], "mytext: no such file; give a file, a folder or a quoted glob"),
        (["none*.txt"], r"none\*.txt: no text here"),
        (["x.parquet"], "x.parquet: unknown kind of text; text has names that end in .txt or .jsonl"),
        (["input.txt", "*.txt"], "input.txt: the same file again"),
    ):
        with pytest.raises(DataError, match=message):
            find_files([tmp_path / given for given in inputs])


def test_read_yields_a_large_file_in_parts(tmp_path):
    """Parts end with a line and have at most READ_BYTES and a line."""
    (tmp_path / "x.txt").write_text("0123456789\n" * 300_000)
    parts = [text for _, text in read(tmp_path / "x.txt")]
    assert len(parts) == 4 and max(map(len, parts)) < (1 << 20) + 11 and all(part[-1] == "\n" for part in parts)


def test_byte_order_mark_is_left_out(tmp_path):
    for name, content in (("x.txt", "text"), ("x.jsonl", '{"text": "text"}\n{"text": "\ufeffmore"}\n')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(read(tmp_path / "x.txt")) == [(1, "text")]
    assert list(read(tmp_path / "x.jsonl")) == [(1, "text"), (2, "\ufeffmore")]
