"""A corpus without a network: the text files of the packages installed on this machine, as shards of tokens.

    python -m benchmarks.losses.corpus OUT [--mb 400] [--tokenizer gpt2|bytes]

Python sources, headers and documentation of site-packages, the standard library, CUDA and /usr/share/doc; files of the
same first 2,000 characters count once.  Whole packages are kept for validation, so that no text of a training file
comes back there.  A machine with PyTorch and CUDA has more than 400 MB of it.  It is code: it compares ways of
training, and says nothing of a loss on prose.  Bytes are for models so small that GPT-2's vocabulary would be most of
their work.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from gpt2_triton.data.prepare.text import prepare_text
from gpt2_triton.errors import DataError

SUFFIXES = (".py", ".pyi", ".h", ".hpp", ".cuh", ".md", ".rst", ".txt")
SHORTEST, LONGEST = 500, 2_000_000  # characters of a file
COMPARED = 2000  # characters by which files are compared
VAL_SHARE, LARGEST_VAL = 0.03, 0.01  # of the characters: in validation, and in one package of it at most


class Document(NamedTuple):
    package: str  # the folder of its root that holds it
    text: str


def roots() -> list[Path]:
    """Return the folders that exist: site-packages, the standard library, CUDA's headers, documentation."""
    named = (Path(torch.__file__).parents[1], Path(os.__file__).parent)
    return [root for root in (*named, Path("/usr/local/cuda/include"), Path("/usr/share/doc")) if root.is_dir()]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def documents(folders: Iterable[Path], most: float) -> list[Document]:
    """Return the distinct texts below the folders, `most` characters in all, in an order that hashes of names give."""
    paths = {path: root for root in folders for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()}
    found, seen, characters = [], set(), 0
    for path in sorted(paths, key=lambda path: _digest(f"{path.parent.name}/{path.name}")):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        start = _digest(text[:COMPARED])
        if not SHORTEST <= len(text) <= LONGEST or start in seen:
            continue
        seen.add(start)
        found.append(Document(path.relative_to(paths[path]).parts[0], text))
        characters += len(text)
        if characters > most:
            break
    return found


def validation_packages(found: Iterable[Document]) -> set[str]:
    """Return small packages with about VAL_SHARE of all characters, in the order of their names' hashes."""
    sizes: dict[str, int] = {}
    for package, text in found:
        sizes[package] = sizes.get(package, 0) + len(text)
    total, held, chosen = sum(sizes.values()), 0, set()
    for package in sorted(sizes, key=_digest):
        if held < VAL_SHARE * total and sizes[package] <= LARGEST_VAL * total:
            chosen.add(package)
            held += sizes[package]
    return chosen


def build(out: Path, folders: Iterable[Path], most: float, workers: int, tokenizer: str) -> set[str]:
    """Write the shards of the texts below the folders into `out`; return the packages of the validation shards.

    DataError if the folders have too little text for both splits.
    """
    found = documents(folders, most)
    chosen = validation_packages(found)
    characters = {True: 0, False: 0}
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        files = {False: Path(folder, "train.jsonl"), True: Path(folder, "val.jsonl")}
        for val, path in files.items():
            with open(path, "w") as file:
                for package, text in found:
                    if (package in chosen) == val:
                        file.write(json.dumps({"text": text}) + "\n")
                        characters[val] += len(text)
        if not all(characters.values()):
            got = f"{len(found)} files of {sum(characters.values()):,} characters"
            raise DataError(f"{out}: {got} in {', '.join(map(str, folders))}: too little text for two splits")
        prepare_text(list(files.values()), out, tokenizer, characters[True] / sum(characters.values()), workers)
    train, val = (f"{characters[which] / 1e6:.1f} MB" for which in (False, True))
    print(f"{len(found):,} files, {train} to train on, {val} to validate")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="directory of the shards, train_*.bin and val_*.bin")
    parser.add_argument("--mb", type=float, default=400, help="millions of characters at most")
    parser.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2", help="tokenizer of the shards")
    a = parser.parse_args()
    a.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    chosen = build(a.out.absolute(), roots(), a.mb * 1e6, os.cpu_count() or 1, a.tokenizer)
    print(f"packages of the validation shards: {', '.join(sorted(chosen))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
