"""Text on disk as documents: .txt holds one, .jsonl one per line, in its field "text"; each may be compressed as .gz.
A byte order mark at the start of a file is left out.

Files are read in parts, so memory grows with the longest line and not with the file.
"""

import codecs
import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from gpt2_triton.data.prepare.encoding import conversion, likely_encoding
from gpt2_triton.errors import DataError, bad_data
from gpt2_triton.files import expand_glob, is_text, sha256

READ_BYTES = 1 << 20
ENDINGS = "names that end in .txt or .jsonl, or in .txt.gz or .jsonl.gz"
SAFE_CUT = re.compile(r"(?<=\S)[ \t\r\n]")


class File(NamedTuple):
    path: Path
    name: str  # in the record: the file's name, or its path below the folder that was given


# ---- which files ----


def find_files(inputs: Sequence[Path]) -> list[File]:
    """Return the files: as given, those of a folder (with its folders) and of a glob sorted.

    DataError if one is missing, of an unknown kind, or given twice.
    """
    files = [file for given in inputs for file in _matches(Path(given))]
    seen: set[Path] = set()
    for path, _ in files:
        if not path.exists():
            got, expected = "No such file or directory", "a file, a folder or a quoted glob"
            raise bad_data(path, "cannot read", got, expected, "correct the path")
        if not is_text(path):
            raise bad_data(path, "unknown kind of text", path.name, ENDINGS, "rename it or leave it out")
        if path.resolve() in seen:
            raise bad_data(path, "the same file again", "it twice", "each file once", "leave one out")
        seen.add(path.resolve())
    return files


def _matches(given: Path) -> list[File]:
    if given.is_dir():
        paths = [p for p in sorted(given.rglob("*")) if is_text(p) and p.is_file()]
        names = [(p, p.relative_to(given)) for p in paths]
        found = [File(p, str(name)) for p, name in names if not any(part.startswith(".") for part in name.parts)]
    elif glob.has_magic(str(given)) and not given.exists():
        found = [s for p in expand_glob(str(given)) for s in _matches(Path(p))]
    else:
        found = [File(given, given.name)]
    if not found:
        raise bad_data(given, "no text here", "0 files", ENDINGS, "correct the path")
    return found


# ---- what is in them ----


def measure(path: Path) -> tuple[str, int]:
    """Return the sha256 of a file and the characters of its documents; reads and so checks the whole file."""
    try:
        digest = sha256(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    characters = sum(len(text) for _, text in read(path))
    if not characters:
        raise bad_data(path, "empty", "0 characters", "text in UTF-8", "leave this file out")
    return digest, characters


def read(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (document, text) in order: a long document in several parts, an empty one not at all."""
    line, json_lines = 1, path.name.removesuffix(".gz").endswith(".jsonl")
    try:
        with cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else open(path, "rb") as file:
            while lines := file.readlines(READ_BYTES):
                if line == 1:
                    lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
                if json_lines:
                    documents = ((n, _json_text(path, n, data)) for n, data in enumerate(lines, line))
                    yield from ((n, text) for n, text in documents if text)
                else:
                    yield 1, _decode(path, line, b"".join(lines))
                line += len(lines)
    except (OSError, EOFError, zlib.error) as error:  # the last two: a .gz that was cut off or damaged
        raise _unreadable(f"{path}, after line {line - 1:,}" if line > 1 else path, error) from None


def _unreadable(where: object, error: Exception) -> DataError:
    got = getattr(error, "strerror", None) or str(error)
    return bad_data(where, "cannot read", got, "a whole text file", "correct the path or copy the file again")


def _decode(path: Path, line: int, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = error.start
        where, got = f"{path}, line {line + data.count(bytes([10]), 0, at):,}", f"byte 0x{data[at]:02x}"
        encoding = likely_encoding(data, at)
        likely = "damaged UTF-8" if encoding == "UTF-8" else encoding
        todo = f"it is likely {likely}: prepare what this command writes: {conversion(path, encoding)}"
        raise bad_data(where, "not UTF-8", got, "text in UTF-8", todo) from None


def _json_text(path: Path, line: int, data: bytes) -> str:
    """Return the field "text" of one line; "" for a blank line."""
    row, where, todo = _decode(path, line, data), f"{path}, line {line:,}", "correct or remove this line"
    if not row.strip():
        return ""
    try:
        value = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise bad_data(where, "not JSON", error, 'an object {"text": "..."}', todo) from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        got = f"the fields {', '.join(value) or 'of none'}" if isinstance(value, dict) else type(value).__name__
        got = f"one of type {type(text).__name__}" if text is not None else got
        raise bad_data(where, 'no string in field "text"', got, 'an object {"text": "..."}', todo)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x} alone"
        raise bad_data(where, "half a surrogate pair", half, "whole characters", todo) from None
    return text


# ---- pieces to tokenise ----


def split_at_whitespace(parts: Iterable[str], size: int) -> Iterator[str]:
    """Split a document, given in parts, into pieces of at least `size` characters, the last one shorter.

    The pieces have the tokens of the whole.  They end where whitespace begins, and no token of either tokenizer lies
    across such a place: GPT-2's pattern matches no whitespace after other characters.
    """
    rest = ""
    for part in parts:
        rest += part
        start = 0
        while found := SAFE_CUT.search(rest, start + size):
            yield rest[start : found.start()]
            start = found.start()
        rest = rest[start:]
    if rest:
        yield rest
