"""The content of a text file as parts of one text or as rows, unpacked and
decoded; a fault is one line.
"""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import re
import shlex
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from gpt2_triton.data.text_names import COMPRESSIONS
from gpt2_triton.errors import DataError

READ_BYTES = 1 << 20
POINTER = b"version https://git-lfs.github.com/"  # stands for a file that Git LFS has not fetched
SPACE = re.compile(r"\s*")
UNREADABLE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)  # cut off or damaged


def ending_of(path: Path) -> str:
    """Return the ending that names the kind of text."""
    stem, ending = os.path.splitext(path.name.lower())
    return os.path.splitext(stem)[1] if ending in COMPRESSIONS else ending


def refuse_pointer(path: Path) -> None:
    """Raise DataError for a file that Git LFS has not fetched."""
    with open(path, "rb") as file:
        begin = file.read(len(POINTER))
    if begin == POINTER:
        raise DataError(
            f"{path}: a pointer of Git LFS, not the text; `git lfs pull` in its folder gets it"
        )


def _open(path: Path) -> BinaryIO:
    """Open a file, unpacked as it is named."""
    ending = path.suffix.lower()
    if ending == ".zst":
        import pyarrow

        unpacked = pyarrow.input_stream(str(path), compression="zstd")
        return cast(BinaryIO, io.BufferedReader(unpacked))
    opener: Any = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(ending, open)
    return opener(path, "rb")


def parts(path: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield (place, whether the document begins, text) in parts that end with a line."""
    line = 1
    with _open(path) as file:
        while lines := file.readlines(READ_BYTES):
            text = decode(path, line, b"".join(lines))
            yield f"{path}, lines {line:,} to {line + len(lines) - 1:,}", line == 1, text
            line += len(lines)


def json_rows(path: Path, one_value: bool) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a file with a row in each line; with `one_value` also of
    one value of several lines.
    """
    with _open(path) as file:
        lines = (
            (number, decode(path, number, data).strip()) for number, data in enumerate(file, 1)
        )
        for number, line in lines:
            if one_value and line and not (line.startswith("{") and line.endswith("}")):
                text = "\n".join([line, *(more for _, more in lines)])
                for n, row in enumerate(_values(path, number, text), 1):
                    yield f"{path}, row {n:,}", row
            else:
                for row in _values(path, number, line):
                    yield f"{path}, line {number:,}", row


def _values(path: Path, line: int, text: str) -> Iterator[Any]:
    """Yield the items of lists, and other values, one or several; `text` begins in this line."""
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {line + error.lineno - 1:,}: not JSON: {error.msg}; "
                "correct or remove this row; a .json may have rows of several lines, a .jsonl not"
            ) from None
        yield from value if isinstance(value, list) else [value]
        at = cast(Any, SPACE.match(text, end)).end()


def parquet_rows(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, row), of the column `field` alone if it is there."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = [field] if {field, field.partition(".")[0]} & {*file.schema_arrow.names} else None
        batches = file.iter_batches(1024, columns=columns)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for n, row in enumerate(rows, 1):
            yield f"{path}, row {n:,}", row


def unreadable(where: object, error: Exception) -> DataError:
    """Return the error about a file that cannot be read, with the fix."""
    why = getattr(error, "strerror", None) or str(error)
    todo = "correct the path or copy the file again"
    if "requires too much memory" in why:  # a window of more than 128 MiB
        todo = (
            "`zstd -d --long=31 FILE` unpacks it; give the unpacked file, and move the other away"
        )
    return DataError(f"{where}: cannot read: {why}; {todo}")


def decode(path: Path, line: int, data: bytes) -> str:
    """Return the text of `data`, which begins in this line, without a file's byte order mark;
    DataError unless it is UTF-8.
    """
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        number = line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {number:,}: not UTF-8: byte 0x{data[error.start]:02x}; "
            f"`iconv -f ENCODING -t utf-8 {shlex.quote(str(path))} > NEW` converts it, unpacked; "
            "ENCODING is UTF-16 or the language's, as CP1252 (western), CP1251 (Russian), SHIFT_JIS"
        ) from None
