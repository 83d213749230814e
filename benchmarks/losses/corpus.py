"""Makes a corpus without a network: the text files of the packages on this machine, as shards of tokens.

    python -m benchmarks.losses.corpus OUT [--mb 400] [--tokenizer gpt2|bytes]

The files are Python sources, headers and documentation of site-packages, the standard library, CUDA and /usr/share/doc.
Files with the same first 2,000 characters count once.  A package is in one split only, training or validation.  A
machine with PyTorch and CUDA has more than 400 MB.  The corpus is code: use it to compare ways of training, but do not
compare its losses with losses on prose.  For small models choose bytes: the head for GPT-2's vocabulary would be slow.
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
COMPARED = 2000  # first characters, by which duplicates are found
VAL_SHARE, LARGEST_VAL = 0.03, 0.01  # shares of all characters: validation, and its largest package


class Document(NamedTuple):
    package: str  # the first folder of the path below the root
    text: str


def roots() -> list[Path]:
    """Return the folders that exist: site-packages, the standard library, CUDA's headers, documentation."""
    named = (Path(torch.__file__).parents[1], Path(os.__file__).parent)
    return [root for root in (*named, Path("/usr/local/cuda/include"), Path("/usr/share/doc")) if root.is_dir()]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def documents(folders: Iterable[Path], most: float) -> list[Document]:
    """Return distinct texts below the folders, `most` characters in all, in the order of their names' hashes."""
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


def build(out: Path, folders: list[Path], most: float, tokenizer: str) -> set[str]:
    """Write the shards of the texts below the folders into `out`; return the packages of the validation shards.

    DataError if the folders have too little text for both splits.
    """
    found = documents(folders, most)
    chosen = validation_packages(found)
    splits = {"train": [d.text for d in found if d.package not in chosen],
              "val": [d.text for d in found if d.package in chosen]}  # fmt: skip
    train, val = (sum(map(len, texts)) for texts in splits.values())
    if not (train and val):
        raise DataError(f"{out}: {train + val:,} characters below {folders} are too few for train and val")
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        files = [Path(folder, f"{split}.jsonl") for split in splits]
        for file, texts in zip(files, splits.values(), strict=True):
            with open(file, "w") as opened:
                opened.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        prepare_text(files, out, tokenizer, val / (train + val), os.cpu_count() or 1)
    print(f"{len(found):,} files, {train / 1e6:.1f} MB to train on, {val / 1e6:.1f} MB to validate")
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the shards, train_*.bin and val_*.bin")
    parser.add_argument("--mb", type=float, default=400, help="millions of characters at most")
    parser.add_argument("--tokenizer", choices=("gpt2", "bytes"), default="gpt2", help="tokenizer of the shards")
    a = parser.parse_args()
    out = a.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"packages of the validation shards: {', '.join(sorted(build(out, roots(), a.mb * 1e6, a.tokenizer)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
