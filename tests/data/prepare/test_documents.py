"""Text files as documents: which files, what is in them, pieces with the tokens of the whole."""

import gzip
import json
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.data.prepare.documents import find_files, measure, read, split_at_whitespace
from gpt2_triton.data.prepare.encoding import conversion, likely_encoding
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
        (["folder"], "folder: no text here: got 0 files, expected names that end in"),
        (["mytext"], "mytext: cannot read: got No such file or directory, expected a file, a folder or a quoted glob"),
        (["none*.txt"], r"none\*.txt: no text here"),
        (["x.parquet"], "x.parquet: unknown kind of text: got x.parquet, expected names that end in .txt or .jsonl"),
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


ENGLISH = "It was the best of times \N{EN DASH} \N{LEFT DOUBLE QUOTATION MARK}it was the worst\N{HORIZONTAL ELLIPSIS}\n"
FRENCH = "Les \xe9l\xe8ves fran\xe7ais \xe9taient tr\xe8s contents de leur \xe9t\xe9 \xe0 la plage.\n"
GERMAN = "Gr\xf6\xdfere \xdcbungen f\xfcr alle M\xe4nner.\n"
RUSSIAN = "Все счастливые семьи похожи друг на друга.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"
KOREAN = "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.\n"
SIMPLIFIED = "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。\n"
TRADITIONAL = "道可道，非常道。名可名，非常名。無名天地之始；有名萬物之母。\n"
ENCODED = [
    (ENGLISH, "UTF-16", "UTF-16"),
    (ENGLISH, "UTF-32", "UTF-32"),
    (FRENCH, "UTF-16LE", "UTF-16LE"),
    (FRENCH, "UTF-16BE", "UTF-16BE"),
    (ENGLISH, "CP1252", "CP1252"),
    (FRENCH, "CP1252", "CP1252"),
    (FRENCH, "ISO-8859-1", "CP1252"),  # the same bytes
    (GERMAN + "\x85\x81", "ISO-8859-1", "ISO-8859-1"),  # CP1252 has no 0x81
    (RUSSIAN, "CP1251", "CP1251"),
    (RUSSIAN, "KOI8-R", "KOI8-R"),
    (JAPANESE, "CP932", "CP932"),
    (JAPANESE, "EUC-JP", "EUC-JP"),
    (KOREAN, "EUC-KR", "EUC-KR"),
    (SIMPLIFIED, "GB18030", "GB18030"),
    (TRADITIONAL, "BIG5", "BIG5"),
]


def convert(command):
    """Run a command in sh; skip the test where there is no iconv, which Windows and small containers lack."""
    if shutil.which("iconv") is None:
        pytest.skip("no iconv")
    subprocess.run(["sh", "-c", command], check=True)


@pytest.mark.parametrize(("text", "encoding", "named"), ENCODED, ids=lambda value: value if len(value) < 11 else "")
@pytest.mark.parametrize("ascii", ["", "Plain lines before.\n" * 100], ids=["short", "long"])
def test_the_command_in_the_error_converts_text_that_is_not_utf8(tmp_path, text, encoding, named, ascii):
    path, whole = tmp_path / "it's mine.txt", ascii + text
    path.write_bytes(whole.encode(encoding))
    with pytest.raises(DataError, match=f"not UTF-8: got byte 0x.*it is likely {named}: ") as error:
        measure(path)
    convert(str(error.value).partition("command writes: ")[2])
    [written] = set(tmp_path.iterdir()) - {path}
    assert written.read_text(encoding="utf-8") == whole
    assert measure(find_files([written])[0].path)[1] == len(whole)


def test_the_command_for_compressed_lines_of_json_works(tmp_path):
    row = json.dumps({"text": FRENCH}, ensure_ascii=False)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(row.encode("CP1252")))
    with pytest.raises(DataError, match="it is likely CP1252: ") as error:
        measure(tmp_path / "x.jsonl.gz")
    convert(str(error.value).partition("command writes: ")[2])
    assert measure(tmp_path / "x.utf8.jsonl.gz")[1] == len(FRENCH)


def test_damaged_utf8_is_not_taken_for_another_encoding(tmp_path):
    damaged = (RUSSIAN * 3).encode()[:-2] + b"\xff\n"
    assert likely_encoding(damaged, len(damaged) - 3) == "UTF-8"
    (tmp_path / "x.txt").write_bytes(damaged)
    with pytest.raises(DataError, match="likely damaged UTF-8: .*iconv -c -f UTF-8 -t UTF-8 "):
        measure(tmp_path / "x.txt")
    assert conversion(tmp_path / "x.txt", "UTF-8").endswith(f"> {tmp_path}/x.utf8.txt")
