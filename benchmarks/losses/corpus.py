"""Makes a corpus as shards of tokens: the code of this machine, or English prose.

    python -m benchmarks.losses.corpus OUT [--mb 400] [--tokenizer gpt2|bytes]
    python -m benchmarks.losses.corpus OUT --prose

Code needs no network: Python sources, headers and documentation of site-packages, the standard
library, CUDA and /usr/share/doc.  A machine with PyTorch and CUDA has more than 400 MB.  Prose
comes from packages and books; prose.py names each source and its licence, and OUT/sources.tsv
what was fetched.  Compare ways of training on either, but no loss on code with a loss on prose.
Texts with the same first 2,000 characters count once.  A package, or all books of an author,
are in one split only, training or validation.  For small models choose bytes: the head for
GPT-2's vocabulary would be slow.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from benchmarks.losses.prose import BOOKS, collect
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.data.prepare.build import SHARD_TOKENS
from gpt2_triton.data.prepare.text import measure_text, prepare_text
from gpt2_triton.errors import DataError
from gpt2_triton.files import write_atomic

SUFFIXES = (".py", ".pyi", ".h", ".hpp", ".cuh", ".md", ".rst", ".txt")
SHORTEST, LONGEST = 500, 2_000_000  # characters of a text, and of a file of code
COMPARED = 2000  # first characters, by which duplicates are found
VAL_SHARE, LARGEST_VAL = 0.03, 0.01  # shares of all characters: validation, and its largest package
PROSE_TOKENS = 25_000_000  # of a shard of prose
SOURCES = "sources.tsv"
app = make_app("python -m benchmarks.losses.corpus")


class Document(NamedTuple):
    package: str  # of code, the first folder of the path below the root
    text: str


def roots() -> list[Path]:
    """Return the folders that exist: site-packages, the standard library,
    CUDA's headers, documentation.
    """
    named = (Path(torch.__file__).parents[1], Path(os.__file__).parent)
    return [
        root
        for root in (*named, Path("/usr/local/cuda/include"), Path("/usr/share/doc"))
        if root.is_dir()
    ]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def code(folders: Iterable[Path]) -> Iterator[Document]:
    """Yield the texts below the folders, in the order of their names' hashes."""
    paths = {
        path: root
        for root in folders
        for path in root.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    }
    for path in sorted(paths, key=lambda path: _digest(f"{path.parent.name}/{path.name}")):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) <= LONGEST:
            yield Document(path.relative_to(paths[path]).parts[0], text)


def distinct(documents: Iterable[Document], most: float = float("inf")) -> list[Document]:
    """Return the distinct documents of SHORTEST characters or more, `most` characters in all."""
    found = []
    seen = set()
    characters = 0
    for document in documents:
        start = _digest(document.text[:COMPARED])
        if len(document.text) < SHORTEST or start in seen:
            continue
        seen.add(start)
        found.append(document)
        characters += len(document.text)
        if characters > most:
            break
    return found


def validation_packages(found: Iterable[Document]) -> set[str]:
    """Return small packages with about VAL_SHARE of all characters, in the
    order of their names' hashes.
    """
    sizes: dict[str, int] = {}
    for package, text in found:
        sizes[package] = sizes.get(package, 0) + len(text)
    total = sum(sizes.values())
    held = 0
    chosen = set()
    for package in sorted(sizes, key=_digest):
        if held < VAL_SHARE * total and sizes[package] <= LARGEST_VAL * total:
            chosen.add(package)
            held += sizes[package]
    return chosen


def build(out: Path, found: list[Document], tokenizer: str, shard_tokens: int) -> None:
    """Write the shards of the documents into `out`; DataError if they
    are too few for both splits.
    """
    chosen = validation_packages(found)
    splits = {"train": [d.text for d in found if d.package not in chosen],
              "val": [d.text for d in found if d.package in chosen]}  # fmt: skip
    train, val = (sum(map(len, texts)) for texts in splits.values())
    if not (train and val):
        raise DataError(
            f"{out}: {train + val:,} characters are too few for train and val; give more text"
        )
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        files = [Path(folder, f"{split}.jsonl") for split in splits]
        for file, texts in zip(files, splits.values(), strict=True):
            with open(file, "w") as opened:
                opened.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        prepare_text(
            measure_text(files, 1),
            out,
            tokenizer,
            val / (train + val),
            os.cpu_count() or 1,
            shard_tokens,
        )
    print(f"{len(found):,} texts, {train / 1e6:.1f} MB to train on, {val / 1e6:.1f} MB to validate")
    print(f"packages of the validation shards: {', '.join(sorted(chosen))}")


def build_prose(out: Path, books: str, tokenizer: str) -> None:
    """Fetch the sources of prose and write their shards, unless they are there."""
    if (out / SOURCES).exists():
        return print(f"{out} is prepared already")
    work = out.with_name(f"{out.name}.sources")
    texts, table = collect(work, books)
    documents = sorted(
        (Document(*row) for row in texts), key=lambda document: _digest(document.text)
    )
    build(out, distinct(documents), tokenizer, PROSE_TOKENS)
    write_atomic(out / SOURCES, table.encode())
    shutil.rmtree(work)


@app.default
def make(
    out: Path,
    *,
    mb: float = 400,
    tokenizer: Literal["gpt2", "bytes"] = "gpt2",
    prose: bool = False,
    books: str = BOOKS,
) -> None:
    """Make shards of the code of this machine, or of English prose.

    Args:
        out: Directory of the shards, train_*.bin and val_*.bin.
        mb: Millions of characters of code at most.
        tokenizer: Tokenizer of the shards.
        prose: Make prose.
        books: A repository for `git clone`, or a folder with its files.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    if prose:
        build_prose(out, books, tokenizer)
    else:
        build(out, distinct(code(roots()), mb * 1e6), tokenizer, SHARD_TOKENS)


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
