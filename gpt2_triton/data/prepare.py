"""From text to a data directory: train_000000.bin, train_000001.bin, ..., val_000000.bin, and their record shards.json.

A directory is built under a hidden name beside its place and renamed once: it is there whole or not at all, whatever
dies meanwhile.  Preparing the same thing again finds it done; a process that comes second uses what the first one made.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.data.shards import HEADER_BYTES, bad_data, write_atomic, write_shard
from gpt2_triton.data.tokenizer import Tokenizer, get_tokenizer

PIECE = 1 << 20  # characters tokenised at a time
REPORT_SECONDS = 5.0
SAFE_CUT = re.compile(r"(?<=\S)\n")

Progress = Callable[[str], None]


def prepare_text(
    files: Sequence[Path],
    out_dir: Path,
    tokenizer: str,
    val_fraction: float = 0.1,
    shard_tokens: int = 100_000_000,
    progress: Progress = print,
) -> Path:
    """Tokenise UTF-8 text files, one document each, into out_dir; the last val_fraction of characters is validation."""
    documents = [_read(Path(file)) for file in files]
    names = [Path(file).name for file in files]
    source = [{"file": name, "sha256": _sha256(text.encode())} for name, text in zip(names, documents, strict=True)]
    recipe = dict(tokenizer=tokenizer, val_fraction=val_fraction, shard_tokens=shard_tokens, source=source)
    return _prepare(documents, recipe, Path(out_dir), progress)


def builtin_text() -> str:
    """The text every CPython ships: pydoc's help topics, about 465,000 characters, a little different by version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def prepare_builtin(out_dir: Path, tokenizer: str = "bytes", progress: Progress = print) -> Path:
    """Tokenise builtin_text() into out_dir; any number of processes may do so at once."""
    text = builtin_text()
    source = [{"file": "pydoc_data.topics", "sha256": _sha256(text.encode())}]
    recipe = dict(tokenizer=tokenizer, val_fraction=0.1, shard_tokens=100_000_000, source=source)
    return _prepare([text], recipe, Path(out_dir), progress)


def builtin_shards(tokenizer: str, root: Path = Path("data")) -> Path:
    """The directory of the built-in data, made on first use; its name holds the text's hash, as Pythons differ."""
    name = f"builtin_{tokenizer}_{_sha256(builtin_text().encode())[:8]}"
    return prepare_builtin(root / name, tokenizer, progress=lambda line: None)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise bad_data(path, "cannot read", error.strerror, "a text file", "correct the path") from None
    if not data:
        raise bad_data(path, "empty", "0 bytes", "text in UTF-8", "leave this file out")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at {error.start:,}"
        raise bad_data(path, "not UTF-8", got, "text in UTF-8", f"convert it with `iconv -t UTF-8 {path}`") from None


def _prepare(documents: list[str], recipe: dict[str, Any], out_dir: Path, progress: Progress) -> Path:
    if _is_done(out_dir, recipe):
        progress(f"{out_dir} is prepared already")
        return out_dir
    tokenizer = get_tokenizer(recipe["tokenizer"])
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temp = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        try:
            _build(temp, documents, recipe, tokenizer, progress)
            _put_in_place(temp, out_dir, recipe)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    except OSError as error:
        todo = "make room or choose another directory"
        raise bad_data(out_dir, "cannot write", error.strerror, "a directory to write to", todo) from None
    progress(f"prepared {out_dir}")
    return out_dir


def _build(temp: Path, documents: list[str], recipe: dict[str, Any], tokenizer: Tokenizer, progress: Progress) -> None:
    train, val = _split(documents, recipe["val_fraction"])
    shards = {}
    for split, texts in (("train", train), ("val", val)):
        tokens = _tokenise(texts, tokenizer, split, progress)
        count = -(-len(tokens) // recipe["shard_tokens"]) if split == "train" else 1
        for i, part in enumerate(np.array_split(tokens, count)):  # equal parts: no last shard that is too short to use
            path = temp / f"{split}_{i:06d}.bin"
            write_shard(path, part)
            shards[path.name] = {"tokens": len(part), "sha256": _sha256(path.read_bytes())}
    write_atomic(temp / "shards.json", json.dumps(recipe | {"shards": shards}, indent=1).encode())


def _split(documents: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """The documents in a row, cut at a character: the first 1 - val_fraction of them, and the rest."""
    total = sum(map(len, documents))
    cut = int(total * (1 - val_fraction))
    if not 0 < cut < total:
        expected = "between 0 and 1, so that training and validation get a character each"
        got = f"{val_fraction} of {total:,} characters"
        raise bad_data("val_fraction", "an empty split", got, expected, "change val_fraction or give more text")
    train, val = [], []
    for document in documents:
        train.append(document[:cut])
        val.append(document[cut:])
        cut = max(0, cut - len(document))
    return [d for d in train if d], [d for d in val if d]


def _tokenise(documents: list[str], tokenizer: Tokenizer, split: str, progress: Progress) -> np.ndarray:
    """All tokens, uint16, with the end-of-text token between documents."""
    start = reported = time.monotonic()
    parts, done, size = [], 0, sum(map(len, documents))
    for i, document in enumerate(documents):
        if i:
            parts.append(np.array([tokenizer.eot], np.uint16))
        for piece in pieces(document):
            parts.append(tokenizer.encode(piece))
            done += len(piece)
            now = time.monotonic()
            if now - reported > REPORT_SECONDS or done == size:
                reported, count = now, sum(map(len, parts))
                rate = count / max(now - start, 1e-9)
                progress(f"{split}: {done / size:4.0%} of {size:,} characters, {count:,} tokens, {rate:,.0f} tokens/s")
    return np.concatenate(parts)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """`text` in pieces of at least `size` characters, the last one shorter, whose tokens are those of the whole.

    They are cut before a newline that follows a character other than whitespace.  No token of either tokenizer lies
    across such a place: GPT-2's pattern takes a newline only into a run of whitespace, and there such a run begins.
    """
    start = 0
    while start < len(text):
        found = SAFE_CUT.search(text, start + size)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def _put_in_place(temp: Path, out_dir: Path, recipe: dict[str, Any]) -> None:
    os.chmod(temp, 0o755)  # mkdtemp keeps other users out
    try:
        os.rename(temp, out_dir)  # takes the place of an empty directory, and fails on anything else
    except OSError:
        if not out_dir.exists():
            raise
        if not _is_done(out_dir, recipe):
            todo = "remove it or choose another directory"
            expected = "a new or empty directory, or these very shards"
            raise bad_data(out_dir, "in use", "something else there", expected, todo) from None


def _is_done(out_dir: Path, recipe: dict[str, Any]) -> bool:
    """Whether out_dir holds what `recipe` makes, by its record and the sizes of its shards."""
    try:
        record = json.loads((out_dir / "shards.json").read_text())
        sizes = {name: (out_dir / name).stat().st_size for name in record["shards"]}
        whole = {name: HEADER_BYTES + 2 * row["tokens"] for name, row in record.pop("shards").items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return record == recipe and sizes == whole
