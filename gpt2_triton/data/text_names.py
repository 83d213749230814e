"""How files that hold text are named, and how those in UTF-16 begin."""

from pathlib import Path

TEXT_KINDS = (".txt", ".md", ".jsonl", ".json")
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # its byte order marks
COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
TEXT_SUFFIXES = (
    ".parquet",  # compressed inside
    *(kind + compression for kind in TEXT_KINDS for compression in ("", *COMPRESSIONS)),
)


def is_text(path: str | Path) -> bool:
    return str(path).lower().endswith(TEXT_SUFFIXES)
