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
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.data.documents import Source, find_sources, measure, pieces, read
from gpt2_triton.data.shards import HEADER_BYTES, bad_data, write_atomic, write_shard
from gpt2_triton.data.tokenizer import get_tokenizer

PIECE = 1 << 20  # characters tokenised at a time, by one worker
REPORT_SECONDS = 5.0

Progress = Callable[[str], None]
Text = tuple[Any, str]  # part of a document: the parts of one follow each other and have the same key
Run = Callable[..., Iterator[Any]]  # `map`, by itself or over several processes
print_now = functools.partial(print, flush=True)  # hours long, and often into a file


def prepare_text(
    inputs: Sequence[Path],
    out_dir: Path,
    tokenizer: str,
    val_fraction: float = 0.1,
    workers: int = 1,
    shard_tokens: int = 100_000_000,
    progress: Progress = print_now,
) -> Path:
    """Tokenise files, folders and globs of text into out_dir; the last val_fraction of characters is validation."""
    sources = find_sources(inputs)
    size = sum(path.stat().st_size for path, _ in sources if path.exists())
    with _workers(min(workers, size // PIECE)) as run:
        measured = _measure(sources, run, progress)
        rows = [{"file": name, "sha256": digest} for (_, name), (digest, _) in zip(sources, measured, strict=True)]
        recipe = dict(tokenizer=tokenizer, val_fraction=val_fraction, shard_tokens=shard_tokens, source=rows)
        texts = (((i, document), text) for i, (path, _) in enumerate(sources) for document, text in read(path))
        characters = sum(count for _, count in measured)
        return _prepare(texts, characters, recipe, Path(out_dir), progress, run)


def _measure(sources: list[Source], run: Run, progress: Progress) -> list[tuple[str, int]]:
    reported, measured = time.monotonic(), []
    for row in run(measure, [path for path, _ in sources]):
        measured.append(row)
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            characters = sum(count for _, count in measured)
            progress(f"read {len(measured):,} of {len(sources):,} files, {characters:,} characters")
    return measured


@contextmanager
def _workers(count: int) -> Iterator[Run]:
    """`map` over `count` processes: results in the order of the tasks, of which it draws a few ahead and no more."""
    if count <= 1:
        yield map
        return
    # spawn: this process may hold threads (tiktoken's, torch's), which a fork would lose while they hold locks
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(count, context, initializer=signal.signal, initargs=ignore)

    def run(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()
        for task in tasks:
            waiting.append(pool.submit(function, task))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield run
    except BrokenProcessPool:
        got, todo = "the end of one, perhaps for lack of memory", "try again with fewer --workers"
        raise bad_data("prepare", "a worker died", got, f"{count} workers to the end", todo) from None
    finally:
        pool.shutdown(cancel_futures=True)


# ---- the text that every Python has ----


def builtin_text() -> str:
    """The text every CPython ships: pydoc's help topics, about 465,000 characters, a little different by version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def prepare_builtin(out_dir: Path, tokenizer: str = "bytes", progress: Progress = print_now) -> Path:
    """Tokenise builtin_text() into out_dir; any number of processes may do so at once."""
    text = builtin_text()
    source = [{"file": "pydoc_data.topics", "sha256": _sha256(text.encode())}]
    recipe = dict(tokenizer=tokenizer, val_fraction=0.1, shard_tokens=100_000_000, source=source)
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
    if _is_done(out_dir, recipe):
        progress(f"{out_dir} is prepared already")
        return out_dir
    cut = int(size * (1 - recipe["val_fraction"]))
    if not 0 < cut < size:
        expected = "between 0 and 1, so that training and validation get a character each"
        got = f"{recipe['val_fraction']} of {size:,} characters"
        raise bad_data("val_fraction", "an empty split", got, expected, "change val_fraction or give more text")
    get_tokenizer(recipe["tokenizer"])  # the workers find it in tiktoken's cache
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temp = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        try:
            shards = _build(temp, _split(texts, cut), size, recipe, progress, run)
            _put_in_place(temp, out_dir, recipe)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    except OSError as error:
        todo = "make room or choose another directory"
        raise bad_data(out_dir, "cannot write", error.strerror, "a directory to write to", todo) from None
    progress(f"prepared {out_dir}: {len(shards)} shards")
    return out_dir


def _build(
    temp: Path,
    texts: Iterable[tuple[str, Text]],
    size: int,
    recipe: dict[str, Any],
    progress: Progress,
    run: Run,
) -> dict[str, Any]:
    shards: dict[str, Any] = {}
    encode, meter = functools.partial(_encode, recipe["tokenizer"]), Meter(size, progress)
    for split, rows in itertools.groupby(texts, key=itemgetter(0)):
        parts = meter.watch(run(encode, _batches(text for _, text in rows)))
        shards |= _write_shards(temp, split, parts, recipe["shard_tokens"])
    if meter.done != size:
        expected, todo = f"the {size:,} that were there a moment ago", "leave the files alone and start again"
        raise bad_data("text", "it changed meanwhile", f"{meter.done:,} characters", expected, todo)
    write_atomic(temp / "shards.json", json.dumps(recipe | {"shards": shards}, indent=1).encode())
    return shards


def _split(texts: Iterable[Text], cut: int) -> Iterator[tuple[str, Text]]:
    """The documents in a row, cut at a character: `cut` of them for train, the rest for val."""
    for key, text in texts:
        if text[:cut]:
            yield "train", (key, text[:cut])
        if text[cut:]:
            yield "val", (key, text[cut:])
        cut = max(0, cut - len(text))


def _batches(texts: Iterable[Text]) -> Iterator[list[tuple[bool, str]]]:
    """Work for one call of _encode: pieces, PIECE characters or more together, and whether each begins a document
    that follows another.
    """
    batch, size = [], 0
    for number, (_, parts) in enumerate(itertools.groupby(texts, key=itemgetter(0))):
        for i, piece in enumerate(pieces((text for _, text in parts), PIECE)):
            batch.append((number > 0 and i == 0, piece))
            size += len(piece)
            if size >= PIECE:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: str, batch: list[tuple[bool, str]]) -> tuple[int, np.ndarray]:
    """Characters and tokens, uint16, with the end-of-text token between documents."""
    coder, parts = get_tokenizer(tokenizer), []
    for follows, piece in batch:
        if follows:
            parts.append(np.array([coder.eot], np.uint16))
        parts.append(coder.encode(piece))
    return sum(len(piece) for _, piece in batch), np.concatenate(parts)


def _write_shards(directory: Path, split: str, parts: Iterable[np.ndarray], limit: int) -> dict[str, Any]:
    """Shards of `limit` tokens, the last two of half of that or more each, so that none is too short to use."""
    rows: dict[str, Any] = {}
    buffer, filled = np.empty(2 * limit, np.uint16), 0

    def write(tokens: np.ndarray) -> None:
        path = directory / f"{split}_{len(rows):06d}.bin"
        write_shard(path, tokens)
        rows[path.name] = {"tokens": len(tokens), "sha256": _sha256(path.read_bytes())}

    for part in parts:
        while len(part):
            taken = part[: len(buffer) - filled]
            buffer[filled : filled + len(taken)] = taken
            part, filled = part[len(taken) :], filled + len(taken)
            if filled == len(buffer):
                write(buffer[:limit])
                buffer[:limit], filled = buffer[limit:], limit
    for half in np.array_split(buffer[:filled], -(-filled // limit)):
        write(half)
    return rows


class Meter:
    """A line about the work every REPORT_SECONDS, and when it is done."""

    def __init__(self, size: int, progress: Progress):
        self.size, self.progress, self.done, self.tokens = size, progress, 0, 0
        self.start = self.reported = time.monotonic()

    def watch(self, results: Iterable[tuple[int, np.ndarray]]) -> Iterator[np.ndarray]:
        for characters, tokens in results:
            self.done, self.tokens = self.done + characters, self.tokens + len(tokens)
            now = time.monotonic()
            if now - self.reported > REPORT_SECONDS or self.done == self.size:
                self.reported = now
                self.progress(self._line(max(now - self.start, 1e-9)))
            yield tokens

    def _line(self, seconds: float) -> str:
        left = timedelta(seconds=round(seconds * (self.size - self.done) / self.done))
        eta = f", {left} left" if self.done < self.size else ""
        rate = self.tokens / seconds
        done = f"{self.done / self.size:4.0%} of {self.size:,} characters"
        return f"{done}, {self.tokens:,} tokens, {rate:,.0f} tokens/s{eta}"


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
