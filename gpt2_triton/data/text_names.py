"""Names of files that hold text to tokenise."""

from pathlib import Path

TEXT_KINDS = (".txt", ".md", ".jsonl", ".json")
COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
TEXT_SUFFIXES = (
    ".parquet",  # compressed inside
    *(kind + compression for kind in TEXT_KINDS for compression in ("", *COMPRESSIONS)),
)


def is_text(path: str | Path) -> bool:
    """Return whether a file is named as text, compressed or not."""
    return str(path).lower().endswith(TEXT_SUFFIXES)
