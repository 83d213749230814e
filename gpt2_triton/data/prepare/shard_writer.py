"""What every preparation shares: processes that tokenise, a line of progress, shards cut from a row of tokens."""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.data.shards import HEADER_BYTES, RECORD, map_tokens, read_record, write_shard
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import bad_data
from gpt2_triton.files import missing_space, sha256

PIECE = 1 << 20  # characters tokenised at a time, by one worker
SHARD_TOKENS = 100_000_000  # llm.c's
REPORT_SECONDS = 5.0

Progress = Callable[[str], None]
Run = Callable[..., Iterator[Any]]  # `map`, by itself or over several processes
Rows = dict[str, dict[str, Any]]  # of a record: {"tokens": ..., "sha256": ...} of each shard, by name
print_now = functools.partial(print, flush=True)  # hours long, and often into a file


# ---- tokenising ----


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """`map` over `count` processes: results in the order of the tasks, of which it draws a few ahead and no more."""
    if count <= 1:
        yield map
        return
    # spawn: this process may hold threads (tiktoken's, torch's), which a fork would lose while they hold locks
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_begin_worker)

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


def _begin_worker() -> None:
    """Ctrl-C is for the parent.  A parent that is killed closes no queue, so its workers would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, name="follow parent", daemon=True).start()


def encode(tokenizer: str, batch: list[tuple[bool, str]]) -> tuple[int, np.ndarray]:
    """Characters and tokens, uint16, of (whether the end-of-text token comes first, text) in a row."""
    coder, parts = get_tokenizer(tokenizer), []
    for eot_first, text in batch:
        if eot_first:
            parts.append(np.array([coder.eot], np.uint16))
        parts.append(coder.encode(text))
    return sum(len(text) for _, text in batch), np.concatenate(parts)


class Clock:
    """`due` is true every REPORT_SECONDS."""

    def __init__(self) -> None:
        self.start = self._last = time.monotonic()

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._last <= REPORT_SECONDS:
            return False
        self._last = now
        return True


class Meter:
    """A line about the work every REPORT_SECONDS, and when it is done; `done` of `size` units, where size is known."""

    def __init__(self, size: int | None, unit: str, progress: Progress, done: int = 0):
        self.size, self.unit, self.progress, self.done, self.first, self.tokens = size, unit, progress, done, done, 0
        self.clock = Clock()

    def add(self, units: int, tokens: int) -> None:
        self.done, self.tokens = self.done + units, self.tokens + tokens
        if self.clock.due() or self.done == self.size:
            self.progress(self._line(max(time.monotonic() - self.clock.start, 1e-9)))

    def _line(self, seconds: float) -> str:
        rate = f"{self.tokens:,} tokens, {self.tokens / seconds:,.0f} tokens/s"
        if self.size is None or self.done > self.size:
            return f"{self.done:,} {self.unit}, now {rate}"
        left = timedelta(seconds=round(seconds * (self.size - self.done) / max(1, self.done - self.first)))
        eta = f", {left} left" if self.done < self.size else ""
        return f"{self.done / self.size:4.0%} of {self.size:,} {self.unit}, {rate}{eta}"


# ---- shards ----


def write_shards(directory: Path, parts: Iterator[np.ndarray], plan: Iterable[tuple[str, int]]) -> Iterator[Rows]:
    """Write tokens in a row as shards of the planned (name, tokens), the last one with what is left.

    Yields the row of each when it is on disk.  Of `parts`, no more is drawn than the shard at hand needs.
    """
    held: list[np.ndarray] = []
    for name, size in plan:
        while (count := sum(map(len, held))) < size and (part := next(parts, None)) is not None:
            held.append(part)
        if not count:
            return
        tokens = np.concatenate(held)
        write_shard(directory / name, tokens[:size])
        held = [tokens[size:].copy()]  # a view would hold on to the whole shard
        yield {name: row_of(directory / name)}


def lengthen_last(directory: Path, names: list[str], limit: int) -> Rows:
    """Halve the last two shards together where the last is shorter than half of `limit`: none is too short to use.

    Returns the rows that changed.  The last one is written first: a kill in between leaves the one before as it was.
    """
    if len(names) < 2 or 2 * len(map_tokens(directory / names[-1])) >= limit:
        return {}
    tokens = np.concatenate([map_tokens(directory / name) for name in names[-2:]])
    halves = zip(names[-2:], np.array_split(tokens, 2), strict=True)
    for name, half in reversed(list(halves)):
        write_shard(directory / name, half)
    return {name: row_of(directory / name) for name in names[-2:]}


def row_of(path: Path) -> dict[str, Any]:
    """What a record says of a shard."""
    return {"tokens": (path.stat().st_size - HEADER_BYTES) // 2, "sha256": sha256(path)}


def is_done(out_dir: Path, recipe: dict[str, Any]) -> bool:
    """Whether out_dir holds what `recipe` makes, by its record and the sizes of its shards."""
    record = read_record(out_dir / RECORD)
    try:
        sizes = {name: (out_dir / name).stat().st_size for name in record["shards"]}
        whole = {name: HEADER_BYTES + 2 * row["tokens"] for name, row in record.pop("shards").items()}
    except (OSError, LookupError, TypeError, AttributeError):
        return False
    return record == recipe and sizes == whole


def in_use(out_dir: Path) -> Exception:
    expected, todo = "a new or empty directory, or these very shards", "remove it or choose another directory"
    return bad_data(out_dir, "in use", "something else there", expected, todo)


def require_space(directory: Path, tokens: int) -> None:
    """Refuse to begin where `tokens` more, two bytes each, do not fit."""
    if missing := missing_space(directory, 2 * tokens):
        needed, free = missing
        expected, todo = f"{needed:,} for {tokens:,} tokens", "make room or choose another directory"
        raise bad_data(directory, "not enough room", f"{free:,} bytes free", expected, todo)


@contextmanager
def written_to(out_dir: Path) -> Iterator[None]:
    """What the disk refuses is one line."""
    try:
        yield
    except OSError as error:
        todo = "make room or choose another directory"
        raise bad_data(out_dir, "cannot write", error.strerror or error, "a directory to write to", todo) from None
