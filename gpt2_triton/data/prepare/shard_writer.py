"""Parts of every preparation: processes that tokenise, shards cut from a stream of tokens, records of shards."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.data.shards import HEADER_BYTES, RECORD, map_tokens, read_record, write_shard
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import DataError, bad_data
from gpt2_triton.files import missing_space, sha256

BATCH_CHARS = 1 << 20  # characters tokenised at a time, by one worker
SHARD_TOKENS = 100_000_000  # llm.c's

Log = Callable[[str], None]
ParallelMap = Callable[..., Iterator[Any]]  # `map`, in this process or over several
ShardRecords = dict[str, dict[str, Any]]  # {"tokens": ..., "sha256": ...} of each shard, by name
Pieces = Sequence[tuple[bool, str | np.ndarray]]  # (whether the end-of-text token comes first, text or its tokens)


# ---- tokenising ----


@contextmanager
def workers(count: int) -> Iterator[ParallelMap]:
    """Yield a `map` over `count` processes.  Results keep the order of the tasks, of which it takes a few ahead."""
    if count <= 1:
        yield map
        return
    # spawn: this process may have threads (tiktoken's, torch's), whose locks a fork would copy in whatever state
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_begin_worker)

    def parallel_map(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()
        for task in tasks:
            waiting.append(pool.submit(function, task))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield parallel_map
    except BrokenProcessPool:
        got, todo = "the end of one, perhaps for lack of memory", "try again with fewer --workers"
        raise bad_data("prepare", "a worker died", got, f"{count} workers to the end", todo) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it: a killed parent closes no queue, so a worker would wait forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, name="follow parent", daemon=True).start()


def tokenize_batch(tokenizer: str, pieces: Pieces) -> tuple[int, np.ndarray]:
    """Return the number of characters and the tokens, uint16, of pieces of text; those that are tokens already lose
    the end-of-text tokens at their ends.
    """
    coder, parts = get_tokenizer(tokenizer), []
    for eot_first, text in pieces:
        if eot_first:
            parts.append(np.array([coder.eot], np.uint16))
        parts.append(coder.encode(text) if isinstance(text, str) else _without_ends(text, coder.eot))
    return sum(len(text) for _, text in pieces), np.concatenate(parts)


def _without_ends(tokens: np.ndarray, eot: int) -> np.ndarray:
    inside = np.flatnonzero(tokens != eot)
    return tokens[inside[0] : inside[-1] + 1] if len(inside) else tokens[:0]


# ---- shards ----


def write_shards(
    directory: Path, parts: Iterator[np.ndarray], plan: Iterable[tuple[str, int]]
) -> Iterator[ShardRecords]:
    """Write a stream of tokens as shards of the planned (name, tokens), the last one with what is left.

    Yields the record of each shard once it is on disk.  Takes no more of `parts` than the current shard needs.
    """
    held: list[np.ndarray] = []
    for name, size in plan:
        while (count := sum(map(len, held))) < size and (part := next(parts, None)) is not None:
            held.append(part)
        if not count:
            return
        tokens = np.concatenate(held)
        write_shard(directory / name, tokens[:size])
        held = [tokens[size:].copy()]  # a view would keep the whole shard in memory
        yield {name: shard_record(directory / name)}


def balance_last_two(directory: Path, names: list[str], limit: int) -> ShardRecords:
    """Give the last two shards equal lengths if the last has fewer than limit / 2 tokens; return the changed records.

    The last one is written first: a kill in between leaves the one before as it was.
    """
    if len(names) < 2 or 2 * len(map_tokens(directory / names[-1])) >= limit:
        return {}
    tokens = np.concatenate([map_tokens(directory / name) for name in names[-2:]])
    halves = zip(names[-2:], np.array_split(tokens, 2), strict=True)
    for name, half in reversed(list(halves)):
        write_shard(directory / name, half)
    return {name: shard_record(directory / name) for name in names[-2:]}


def shard_record(path: Path) -> dict[str, Any]:
    return {"tokens": (path.stat().st_size - HEADER_BYTES) // 2, "sha256": sha256(path)}


def is_done(out_dir: Path, recipe: dict[str, Any]) -> bool:
    """Return whether out_dir holds what `recipe` makes, by its record and the sizes of its shards."""
    record = read_record(out_dir / RECORD)
    try:
        sizes = {name: (out_dir / name).stat().st_size for name in record["shards"]}
        whole = {name: HEADER_BYTES + 2 * row["tokens"] for name, row in record.pop("shards").items()}
    except (OSError, LookupError, TypeError, AttributeError, ValueError):  # ValueError: a name with a zero byte
        return False
    return record == recipe and sizes == whole


def is_occupied(out_dir: Path) -> bool:
    """Return whether out_dir is a file or has entries, hidden ones included."""
    return out_dir.is_file() or (out_dir.is_dir() and any(out_dir.iterdir()))


def directory_in_use(out_dir: Path) -> DataError:
    names = sorted(path.name for path in out_dir.iterdir()) if out_dir.is_dir() else ["another file"]
    got = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
    expected = "a new or empty directory, or these very shards"
    return bad_data(out_dir, "in use", got, expected, "choose another directory, as --out of `prepare`, or remove it")


def require_space(directory: Path, tokens: int) -> None:
    """DataError unless `tokens` more tokens, of two bytes each, fit on the disk."""
    if missing := missing_space(directory, 2 * tokens):
        needed, free = missing
        expected, todo = f"{needed:,} for {tokens:,} tokens", "make room or choose another directory"
        raise bad_data(directory, "not enough room", f"{free:,} bytes free", expected, todo)


@contextmanager
def disk_errors_as(out_dir: Path) -> Iterator[None]:
    """Raise an OSError of the block as a DataError about out_dir."""
    try:
        yield
    except OSError as error:
        todo = "make room or choose another directory"
        raise bad_data(out_dir, "cannot write", error.strerror or error, "a directory to write to", todo) from None
