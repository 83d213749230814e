"""Text on disk as documents: .txt holds one, .jsonl one per line, in its field "text"; each may be compressed as .gz.
A byte order mark at the start of a file is left out.

Files are read in parts, so memory grows with the longest line and not with the file.
"""

import codecs
import glob
import gzip
import json
import re
import shlex
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from gpt2_triton.errors import DataError
from gpt2_triton.files import expand_glob, is_text, sha256

READ_BYTES = 1 << 20
ENDINGS = "names that end in .txt or .jsonl, or in .txt.gz or .jsonl.gz"
SAFE_CUT = re.compile(r"(?<=\S)[ \t\r\n]")


class File(NamedTuple):
    path: Path
    name: str  # in the record: the file's name, or its path below the folder that was given


# ---- which files ----


def find_files(inputs: Sequence[Path]) -> list[File]:
    """Return the files as given; the files of a folder, with its folders, and of a glob are sorted.

    DataError if one is missing, of an unknown kind, or given twice.
    """
    files = [file for given in inputs for file in _matches(Path(given))]
    seen: set[Path] = set()
    for path, _ in files:
        if not path.exists():
            raise DataError(f"{path}: no such file; give a file, a folder or a quoted glob")
        if not is_text(path):
            raise DataError(f"{path}: unknown kind of text; text has {ENDINGS}: rename it or leave it out")
        if path.resolve() in seen:
            raise DataError(f"{path}: the same file again; leave one out")
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
        raise DataError(f"{given}: no text here; text has {ENDINGS}: correct the path")
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
        raise DataError(f"{path}: empty; leave this file out")
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
    why = getattr(error, "strerror", None) or error
    return DataError(f"{where}: cannot read: {why}; correct the path or copy the file again")


def _decode(path: Path, line: int, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = f"{path}, line {line + data.count(bytes([10]), 0, error.start):,}"
        command = f"iconv -f ENCODING -t utf-8 {shlex.quote(str(path))} > utf8.txt"
        todo = f"`{command}` converts it; ENCODING is often CP1252 or UTF-16"
        raise DataError(f"{where}: not UTF-8: byte 0x{data[error.start]:02x}; {todo}") from None


def _json_text(path: Path, line: int, data: bytes) -> str:
    """Return the field "text" of one line; "" for a blank line."""
    row, where = _decode(path, line, data).strip(), f"{path}, line {line:,}"
    if not row:
        return ""
    try:
        text = json.loads(row)["text"]
        text.encode()
    except (ValueError, RecursionError) as error:  # UnicodeEncodeError: half a surrogate pair
        raise DataError(f"{where}: not JSON: {error}; correct or remove this line") from None
    except (KeyError, TypeError, AttributeError):  # no such field, no object, no string
        wrong = 'no {"text": "..."} but ' + textwrap.shorten(row, 100, placeholder=" ...")
        raise DataError(f"{where}: {wrong}; correct or remove this line") from None
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
