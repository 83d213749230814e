"""Tokenises a source of documents into a directory of shards.  A preparation that was stopped is resumed.

progress.json holds the finished shards and the position in the source where each begins, and the next one; at the end
shards.json replaces it.  However often a preparation was stopped, and with any number of workers, the bytes are those
of one that was not.
"""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import textwrap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpt2_triton.console import Progress
from gpt2_triton.data.prepare import shard_writer
from gpt2_triton.data.prepare.shard_writer import Log, ParallelMap, Pieces, ShardRecords, tokenize_batch
from gpt2_triton.data.shards import RECORD, read_record
from gpt2_triton.errors import bad_data
from gpt2_triton.files import MARK, remove_abandoned, write_atomic

PROGRESS = "progress.json"
HIDDEN = re.compile(r"\..*\." + MARK + r"\.tmp")  # a file that a process is writing

# {"state": the source before a batch, "first": sha256 of the batch's first text, "skip": tokens of the batch to skip}
StreamPosition = dict[str, Any]


class Batch(NamedTuple):
    """One call of tokenize_batch."""

    split: str  # which shards it belongs to; the batches of a split follow each other
    state: Any  # for JSON: the source before this batch
    pieces: Pieces


class Source(Protocol):
    """Documents in a fixed order."""

    name: str
    unit: str  # of the progress: "tokens" or "characters"

    @property
    def size(self) -> int | None:
        """Size in that unit, if known."""

    def batches(self, state: Any) -> Iterator[Batch]:
        """Yield batches from `state` on (None: from the beginning), always the same ones."""

    def done(self, state: Any, tokens: int) -> int:
        """Return how much is done before `state`, in `unit`; `tokens` have been written."""

    def plan(self, split: str, shards: ShardRecords) -> Iterator[tuple[str, int]]:
        """Yield (name, tokens) of the shards of a split that follow those that are written."""


class _TokenStream:
    """The tokens of a source from a position on, and the positions where later ones begin."""

    def __init__(self, source: Source, start: StreamPosition | None):
        self._source, self._start = source, start
        self._pending: deque[StreamPosition] = deque()  # of the batches being tokenised, oldest first
        self._position: StreamPosition = {}  # of the last array that was yielded
        self._length = self._yielded = 0  # tokens of that array, with those skipped; tokens yielded in all

    def tokens(self, run: ParallelMap, tokenizer: str, progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (split, tokens) of each batch."""
        skip = self._start["skip"] if self._start else 0
        splits: deque[str] = deque()
        for characters, tokens in run(functools.partial(tokenize_batch, tokenizer), self._batches(splits)):
            self._position, self._length = self._pending.popleft(), len(tokens)
            rest = tokens[skip:]
            skip -= len(tokens) - len(rest)
            self._yielded += len(rest)
            progress.advance(characters if self._source.unit == "characters" else len(rest))
            yield splits.popleft(), rest

    def position(self, used: int) -> StreamPosition:
        """Return where token number `used` of those yielded is found; it is in the last array, or follows it."""
        return self._position | {"skip": self._length - (self._yielded - used)}

    def _batches(self, splits: deque[str]) -> Iterator[Pieces]:
        expected = self._start["first"] if self._start else None
        for split, state, pieces in self._source.batches(self._start["state"] if self._start else None):
            text = pieces[0][1]
            first = hashlib.sha256(text.encode() if isinstance(text, str) else text.tobytes()).hexdigest()
            if expected not in (None, first):
                got, todo = "another document", "prepare it again in another directory"
                raise bad_data(self._source.name, "it changed meanwhile", got, f"the one of sha256 {expected}", todo)
            expected = None
            self._pending.append({"state": state, "first": first})
            splits.append(split)
            yield pieces


class Preparation:
    """The shards of a source in a directory, from the first one that is missing or damaged on.

    `recipe` is what the record of the shards will hold next to them; another recipe makes other shards.
    """

    def __init__(self, source: Source, recipe: dict[str, Any], directory: Path, log: Log):
        self._source, self._recipe, self._dir, self._log = source, recipe, directory, log
        self.shards: ShardRecords = {}
        self._positions: list[StreamPosition | None] = [None]  # where each shard begins, and the one after them
        remove_abandoned(directory, HIDDEN)
        self._resume()

    @property
    def tokens(self) -> int:
        """Number of tokens written."""
        return sum(shard["tokens"] for shard in self.shards.values())

    def _resume(self) -> None:
        record = read_record(self._dir / PROGRESS)
        if not record and any(self._dir.glob("*.bin")):
            raise shard_writer.directory_in_use(self._dir)
        if not record.get("shards"):
            return
        shards, positions = record.pop("shards"), record.pop("places")
        for key in sorted(key for key in self._recipe if record.get(key) != self._recipe[key]):
            what, todo = f"begun with another {key}", "give that again or choose another --out"
            got, expected = (textwrap.shorten(str(value[key]), 300) for value in (self._recipe, record))
            raise bad_data(self._dir, what, got, expected, todo)
        with Progress("checking finished shards", sum(shard["tokens"] for shard in shards.values()), "tokens") as meter:
            for name, shard in shards.items():
                path = self._dir / name
                if not path.exists() or shard_writer.shard_record(path) != shard:
                    self._log(f"{path} is damaged: preparing again from there")
                    break
                self.shards[name] = shard
                meter.advance(shard["tokens"])
        self._positions = positions[: len(self.shards) + 1]
        self._log(f"resuming after {len(self.shards)} finished shards, {self.tokens:,} tokens")

    def write(self, run: ParallelMap, expected_tokens: int) -> None:
        """Write the shards that are missing, about `expected_tokens` in all."""
        start, done = self._positions[-1], self.tokens
        shard_writer.require_space(self._dir, max(0, expected_tokens - done))
        self._record_progress()
        if done == self._recipe.get("tokens"):
            return
        stream = _TokenStream(self._source, start)
        before = self._source.done(start["state"], done) if start else 0
        with Progress(f"tokenising {self._source.name}", self._source.size, self._source.unit, before) as progress:
            batches = stream.tokens(run, self._recipe["tokenizer"], progress)
            for split, of_split in itertools.groupby(batches, key=itemgetter(0)):
                plan = self._source.plan(split, self.shards)
                for shard in shard_writer.write_shards(self._dir, map(itemgetter(1), of_split), plan):
                    self.shards |= shard
                    self._positions.append(stream.position(self.tokens - done))
                    self._record_progress()
                if self.tokens == self._recipe.get("tokens"):
                    return

    def _record_progress(self) -> None:
        record = self._recipe | {"shards": self.shards, "places": self._positions}
        write_atomic(self._dir / PROGRESS, json.dumps(record, indent=1).encode())

    def finish(self) -> None:
        """Balance the last two shards of each split, and replace progress.json by shards.json."""
        for split in ("train", "val"):
            names = [name for name in self.shards if name.startswith(split)]
            self.shards |= shard_writer.balance_last_two(self._dir, names, self._recipe["shard_tokens"])
        write_atomic(self._dir / RECORD, json.dumps(self._recipe | {"shards": self.shards}, indent=1).encode())
        (self._dir / PROGRESS).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was written."""
        for name in (*self.shards, PROGRESS):
            (self._dir / name).unlink(missing_ok=True)


@contextmanager
def locked(directory: Path, log: Log) -> Iterator[bool]:
    """Create a directory and hold it against other preparations; wait until another process has finished there.

    Yields whether it is held; it is not if its file system cannot lock directories, as most of NFS.
    """
    with contextlib.ExitStack() as stack:
        while (held := _lock(directory, log, stack)) is None:
            stack.close()
        yield held


def _lock(directory: Path, log: Log, stack: contextlib.ExitStack) -> bool | None:
    """Create, open and lock a directory; `stack` will close it.

    Returns whether it is locked, None if the process that held the lock has renamed or removed the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(directory, os.O_RDONLY)
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another process that prepares {directory}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            return False
        if os.path.samestat(os.fstat(handle), os.stat(directory)):
            return True
    return None
