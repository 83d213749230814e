"""From text to a data directory: train_000000.bin, train_000001.bin, ..., val_000000.bin, ..., and their record
shards.json.

Texts are read twice, to measure and to tokenise, and are never held whole.  A directory is built under a hidden name
beside its place and renamed once: it is there whole or not at all, whatever dies meanwhile.  Preparing the same thing
again finds it done; a process that comes second uses what the first one made.
"""

import functools
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.data.prepare import shard_writer
from gpt2_triton.data.prepare.documents import Source, find_sources, measure, pieces, read
from gpt2_triton.data.prepare.shard_writer import (
    SHARD_TOKENS,
    Meter,
    Progress,
    Rows,
    Run,
    encode,
    in_use,
    is_done,
    print_now,
)
from gpt2_triton.data.shards import RECORD
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import bad_data
from gpt2_triton.files import write_atomic

Text = tuple[Any, str]  # part of a document: the parts of one follow each other and have the same key

CHARACTERS = {"bytes": 1, "gpt2": 5}  # more than most text has to a token, so that no disk with room is refused


def prepare_text(
    inputs: Sequence[Path],
    out_dir: Path,
    tokenizer: str,
    val_fraction: float = 0.1,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress = print_now,
) -> Path:
    """Tokenise files, folders and globs of text into out_dir; the last val_fraction of characters is validation."""
    sources = find_sources(inputs)
    size = sum(path.stat().st_size for path, _ in sources if path.exists())
    with shard_writer.workers(min(workers, size // shard_writer.PIECE)) as run:
        measured = _measure(sources, run, progress)
        rows = [{"file": name, "sha256": digest} for (_, name), (digest, _) in zip(sources, measured, strict=True)]
        recipe = dict(tokenizer=tokenizer, val_fraction=val_fraction, shard_tokens=shard_tokens, source=rows)
        texts = (((i, document), text) for i, (path, _) in enumerate(sources) for document, text in read(path))
        characters = sum(count for _, count in measured)
        return _prepare(texts, characters, recipe, Path(out_dir), progress, run)


def _measure(sources: list[Source], run: Run, progress: Progress) -> list[tuple[str, int]]:
    clock, measured = shard_writer.Clock(), []
    for row in run(measure, [path for path, _ in sources]):
        measured.append(row)
        if clock.due():
            characters = sum(count for _, count in measured)
            progress(f"read {len(measured):,} of {len(sources):,} files, {characters:,} characters")
    return measured


# ---- the text that every Python has ----


def builtin_text() -> str:
    """The text every CPython ships: pydoc's help topics, about 465,000 characters, a little different by version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def prepare_builtin(out_dir: Path, tokenizer: str = "bytes", progress: Progress = print_now) -> Path:
    """Tokenise builtin_text() into out_dir; any number of processes may do so at once."""
    text = builtin_text()
    source = [{"file": "pydoc_data.topics", "sha256": _sha256(text.encode())}]
    recipe = dict(tokenizer=tokenizer, val_fraction=0.1, shard_tokens=SHARD_TOKENS, source=source)
    return _prepare([(0, text)], len(text), recipe, Path(out_dir), progress, map)


def builtin_shards(tokenizer: str, root: Path = Path("data")) -> Path:
    """The directory of the built-in data, made on first use; its name holds the text's hash, as Pythons differ."""
    name = f"builtin_{tokenizer}_{_sha256(builtin_text().encode())[:8]}"
    return prepare_builtin(root / name, tokenizer, progress=lambda line: None)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- building ----


def _prepare(
    texts: Iterable[Text], size: int, recipe: dict[str, Any], out_dir: Path, progress: Progress, run: Run
) -> Path:
    occupied = out_dir.is_file() or (out_dir.is_dir() and any(out_dir.iterdir()))
    if is_done(out_dir, recipe):
        progress(f"{out_dir} is prepared already")
        return out_dir
    if occupied:  # looked at first: what appears meanwhile may be the same data, of another process
        raise in_use(out_dir)
    cut = int(size * (1 - recipe["val_fraction"]))
    if not 0 < cut < size:
        expected = "between 0 and 1, so that training and validation get a character each"
        got = f"{recipe['val_fraction']} of {size:,} characters"
        raise bad_data("val_fraction", "an empty split", got, expected, "change val_fraction or give more text")
    get_tokenizer(recipe["tokenizer"])  # the workers find it in tiktoken's cache
    with shard_writer.written_to(out_dir):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        shard_writer.require_space(out_dir.parent, size // CHARACTERS[recipe["tokenizer"]])
        temp = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        try:
            shards = _build(temp, _split(texts, cut), size, recipe, progress, run)
            _put_in_place(temp, out_dir, recipe)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    progress(f"prepared {out_dir}: {len(shards)} shards")
    return out_dir


def _build(
    temp: Path,
    texts: Iterable[tuple[str, Text]],
    size: int,
    recipe: dict[str, Any],
    progress: Progress,
    run: Run,
) -> Rows:
    rows: Rows = {}
    encoder, limit = functools.partial(encode, recipe["tokenizer"]), recipe["shard_tokens"]
    meter = Meter(size, "characters", progress)
    for split, group in itertools.groupby(texts, key=itemgetter(0)):
        plan = ((f"{split}_{i:06d}.bin", limit) for i in itertools.count())
        tokens = _watched(meter, run(encoder, _batches(text for _, text in group)))
        written: Rows = {}
        for row in shard_writer.write_shards(temp, tokens, plan):
            written |= row
        rows |= written | shard_writer.lengthen_last(temp, list(written), limit)
    if meter.done != size:
        expected, todo = f"the {size:,} that were there a moment ago", "leave the files alone and start again"
        raise bad_data("text", "it changed meanwhile", f"{meter.done:,} characters", expected, todo)
    write_atomic(temp / RECORD, json.dumps(recipe | {"shards": rows}, indent=1).encode())
    return rows


def _watched(meter: Meter, results: Iterable[tuple[int, np.ndarray]]) -> Iterator[np.ndarray]:
    for characters, tokens in results:
        meter.add(characters, len(tokens))
        yield tokens


def _split(texts: Iterable[Text], cut: int) -> Iterator[tuple[str, Text]]:
    """The documents in a row, cut at a character: `cut` of them for train, the rest for val."""
    for key, text in texts:
        if text[:cut]:
            yield "train", (key, text[:cut])
        if text[cut:]:
            yield "val", (key, text[cut:])
        cut = max(0, cut - len(text))


def _batches(texts: Iterable[Text]) -> Iterator[list[tuple[bool, str]]]:
    """Work for one call of encode: pieces, build.PIECE characters or more together, and whether each begins a document
    that follows another.
    """
    batch, size = [], 0
    for number, (_, parts) in enumerate(itertools.groupby(texts, key=itemgetter(0))):
        for i, piece in enumerate(pieces((text for _, text in parts), shard_writer.PIECE)):
            batch.append((number > 0 and i == 0, piece))
            size += len(piece)
            if size >= shard_writer.PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _put_in_place(temp: Path, out_dir: Path, recipe: dict[str, Any]) -> None:
    os.chmod(temp, 0o755)  # mkdtemp keeps other users out
    try:
        os.rename(temp, out_dir)  # takes the place of an empty directory, and fails on anything else
    except OSError:
        if not out_dir.exists():
            raise
        if not is_done(out_dir, recipe):
            raise in_use(out_dir) from None
