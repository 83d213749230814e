"""From shards to packed micro-batches: the order of samples, and a thread
that prepares batches ahead.

A window is seq_len + 1 tokens of one shard, and the next window starts seq_len later.  All shards
have n windows.  Global sample g is window pi(g mod n) of epoch g // n; pi is a pseudo-random
permutation of [0, n) keyed by (seed, epoch).  The order does not depend on batch size, rank or
history.  So the loader's whole state is one integer, the next global sample.

Shifted windows start `phase` tokens later, in each epoch another phase of [0, seq_len):
the model then meets each token at every position of a sequence.  A window that would leave
its shard ends with the shard.
"""

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from gpt2_triton.data.packing import pack_batch, packed_size
from gpt2_triton.data.shards import Shard
from gpt2_triton.errors import DataError


class Samples(Protocol):
    """What MicroBatches reads: a TrainLoader, or a mixture of several."""

    seq_len: int

    def batch(self, first_sample: int, count: int) -> np.ndarray:
        """Return global samples from first_sample on, int32 [count, seq_len + 1]."""

    def place(self, sample: int) -> str:
        """Return SHARD:TOKEN, where a global sample begins."""


# ---- samples ----


def _mix(x: np.ndarray) -> np.ndarray:
    """Return splitmix64's finaliser of x: a bijection of uint64 that mixes all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, epoch: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return pi(index) in [0, n), keyed by (seed, epoch), elementwise (uint64).

    Four Feistel rounds, (l, r) -> (r, l ^ F(r, key)), permute [0, 4^half) for any F; 4^half is the
    first power of four >= n.  A value outside [0, n) is permuted again until it lies inside (cycle
    walking).  The result is still a permutation, and takes at most 4 passes on average.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    stream = _mix(np.full(len(epoch), seed % 2**64, np.uint64))
    keys = [_mix(stream ^ (epoch * np.uint64(4) + np.uint64(i))) for i in range(4)]
    out = index.astype(np.uint64)
    todo = np.arange(len(out))
    while len(todo):
        left = out[todo] >> half
        right = out[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key[todo]) & mask)
        out[todo] = left << half | right
        todo = todo[out[todo] >= n]
    return out


class Windows:
    """The windows of a list of shards, numbered from shard to shard."""

    def __init__(self, shards: Sequence[Shard], seq_len: int):
        self.shards = shards
        self.seq_len = seq_len
        self.ends = np.cumsum([(shard.count - 1) // seq_len for shard in shards])
        self.last_starts = np.array([shard.count - 1 - seq_len for shard in shards])
        self.n = int(self.ends[-1])

    def read(self, windows: np.ndarray, phases: np.ndarray | int = 0) -> np.ndarray:
        """Return the tokens of windows (int64 [count]) that start `phases`
        later, int32 [count, seq_len + 1].

        DataError if a file has changed, or has a token outside the vocabulary.  Every token that
        reaches a kernel is checked here, at a thousandth of the cost of reading and packing it.
        """
        places = self._places(windows, phases)
        tokens = np.stack(
            [self.shards[shard].read(start, self.seq_len + 1) for shard, start in places]
        )
        if tokens.max() >= self.shards[0].vocab_size:
            for row, (shard, start) in zip(tokens, places, strict=True):
                self.shards[shard].require_known(row, start)
        return tokens.astype(np.int32)

    def place(self, window: np.ndarray, phase: np.ndarray | int) -> str:
        """Return SHARD:TOKEN, the path and the number of the first token of one window."""
        [(shard, start)] = self._places(window, phase)
        return f"{self.shards[shard].path}:{start}"

    def _places(self, windows: np.ndarray, phases: np.ndarray | int) -> list[tuple[int, int]]:
        """Return the shard and the first token there of each window."""
        which = np.searchsorted(self.ends, windows, side="right")
        within = windows.astype(np.int64) - np.where(which, self.ends[which - 1], 0)
        starts = np.minimum(within * self.seq_len + phases, self.last_starts[which])
        return list(zip(which.tolist(), starts.tolist(), strict=True))


class TrainLoader:
    """Reads any range of global samples; it has no state."""

    def __init__(self, shards: Sequence[Shard], seq_len: int, seed: int, shifted: bool = False):
        self.windows = Windows(shards, seq_len)
        self.seq_len = seq_len
        self.seed = seed
        self.shifted = shifted

    def batch(self, first_sample: int, count: int) -> np.ndarray:
        return self.samples(np.arange(first_sample, first_sample + count))

    def samples(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples of these numbers, int64 [count], as int32 [count, seq_len + 1]."""
        return self.windows.read(*self._windows(numbers))

    def place(self, sample: int) -> str:
        return self.windows.place(*self._windows(np.array([sample])))

    def _windows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | int]:
        """Return the windows of these samples, and their phases."""
        n = self.windows.n
        epoch, index = np.divmod(numbers.astype(np.uint64), np.uint64(n))
        phases = self._phases(epoch) if self.shifted else 0
        return permute(index, epoch, n, self.seed), phases

    def _phases(self, epoch: np.ndarray) -> np.ndarray:
        """Return the phase of each epoch; none repeats before all have come."""
        T = self.windows.seq_len
        turn, index = np.divmod(epoch, np.uint64(T))
        return permute(index, turn, T, ~self.seed).astype(np.int64)


class ValidationLoader:
    """Reads the first tokens // seq_len windows in order; tokens 0 reads all windows."""

    def __init__(self, shards: Sequence[Shard], seq_len: int, tokens: int):
        self.windows = Windows(shards, seq_len)
        self.count = tokens // seq_len if tokens else self.windows.n
        self.tokens = self.count * seq_len
        if not 1 <= self.count <= self.windows.n:
            most = self.windows.n * seq_len
            raise DataError(
                f"{shards[0].path}: {most:,} tokens in whole sequences, but eval.tokens, or "
                f"--tokens, asks for {tokens:,}; give {seq_len:,} to {most:,}, or 0 for all"
            )

    def batches(
        self, rows: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, targets), int32 [rows, seq_len], of batches rank, rank + ranks,
        ...; the last may be shorter.
        """
        for first in range(rank * rows, self.count, ranks * rows):
            tokens = self.windows.read(np.arange(first, min(first + rows, self.count)))
            yield tokens[:, :-1].copy(), tokens[:, 1:].copy()

    def shapes(self, rows: int) -> set[tuple[int, int]]:
        """Return (sequences, seq_len) of the batches, whose kernels are compiled ahead."""
        return {
            (min(rows, self.count - first), self.windows.seq_len)
            for first in range(0, self.count, rows)
        }


# ---- micro-batches ----


class MicroBatches(NamedTuple):
    """The packed micro-batches of one rank, in any order.

    Let b = micro_batch, and let a step begin with global sample s.  In its micro-step k, rank r
    takes b samples, from sample s + (k * ranks + r) * b on.
    """

    samples: Samples
    micro_batch: int  # sequences
    accumulation: int  # micro-batches of a step
    vocab_size: int
    head_row: int = 0  # where an untied head's rows begin: packing.py
    rank: int = 0
    ranks: int = 1

    @property
    def packed_size(self) -> int:
        """The int32 elements of a micro-batch."""
        rows = self.vocab_size + self.head_row
        return packed_size(self.micro_batch * self.samples.seq_len, rows)

    def first_samples(self, start: int) -> Iterator[int]:
        """Yield where each micro-batch begins, without end, from the step that begins with global
        sample `start` on.
        """
        together = self.ranks * self.micro_batch
        return itertools.count(start + self.rank * self.micro_batch, together)

    def first_samples_of_step(self, start: int) -> Iterator[int]:
        """Yield where the micro-batches of the step begin, whose first global sample is `start`."""
        return itertools.islice(self.first_samples(start), self.accumulation)

    def step(self, start: int) -> Iterator[torch.Tensor]:
        """Yield the micro-batches of the step that begins with global sample `start`."""
        return map(self.packed, self.first_samples_of_step(start))

    def packed(self, first: int, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """Return the micro-batch that begins with global sample `first`, in `buffer` if given."""
        tokens = self.samples.batch(first, self.micro_batch)
        return pack_batch(buffer, tokens[:, :-1], tokens[:, 1:], self.vocab_size, self.head_row)


DEPTH = 3  # the caller reads a buffer, the device copies another, the thread fills the third


class Prefetcher:
    """Iterator over micro-batches, int32 [packed_size], that a thread prepares ahead in a ring of
    DEPTH host buffers; the first one's step begins with global sample `start`.

    A buffer is valid until the next call of next().  By then its copy to the device is issued, but
    perhaps not done.  So next() records an event, and the thread waits for the event before it
    fills the buffer again.
    """

    def __init__(self, batches: MicroBatches, start: int, pinned: bool = False):
        self._batches = batches
        size = batches.packed_size
        self._buffers = [
            torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(DEPTH)
        ]
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(DEPTH)] if pinned else []
        self._gpu = torch.cuda.current_device() if pinned else None
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._returned: int | None = None
        self._closed = False
        for slot in range(DEPTH):
            self._free.put(slot)
        self._thread = threading.Thread(
            target=self._run, args=(start,), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> torch.Tensor:
        """Return the next micro-batch; raise the thread's exception if there is none."""
        if self._returned is not None:
            if self._copied:
                self._copied[self._returned].record()
            self._free.put(self._returned)
            self._returned = None
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)
            raise item
        self._returned = item
        return self._buffers[item]

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        self._closed = True
        self._free.put(0)  # wakes it
        self._thread.join()

    def _run(self, start: int) -> None:
        """Fill the buffers that are free, until `close`; an error goes to the reader."""
        try:
            if self._gpu is not None:
                # a new thread is on GPU 0, and would make a context there
                torch.cuda.set_device(self._gpu)
            for first in self._batches.first_samples(start):
                slot = self._free.get()
                if self._closed:
                    break
                if self._copied:
                    self._copied[slot].synchronize()
                self._batches.packed(first, self._buffers[slot])
                self._ready.put(slot)
            self._ready.put(StopIteration())
        except BaseException as error:
            self._ready.put(error)
