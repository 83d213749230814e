"""Several sources of data in given shares: which sample is whose, and what a run reads of each.

`data.train` and `data.val` are one pattern, or PATH=WEIGHT,PATH=WEIGHT.  The source of a sample is
decided by the sample's number and the seed.  Sources take turns with a period of L samples, in
which source i has exactly its a[i] samples.  Each is then permuted in its own epochs (loader.py).
"""

import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_triton.data.loader import TrainLoader, ValidationLoader
from gpt2_triton.data.shards import Shard
from gpt2_triton.errors import ConfigError

WEIGHTED = re.compile(r"(.+?)\s*=\s*([^=/]*)")
LONGEST_PERIOD = 1 << 16  # samples; shares that need more are rounded to this part
SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of sources; the first has data.seed


class Source(NamedTuple):
    """A pattern of shards, and its part of the samples."""

    pattern: str
    share: Fraction

    @property
    def name(self) -> str:
        """The name of the shards' directory."""
        return Path(self.pattern).parent.name or Path(self.pattern).stem


def sources(given: str) -> list[Source]:
    """Return the sources of data.train or data.val; ConfigError for a wrong weight."""
    parts = [part.strip() for part in given.split(",") if part.strip()]
    found = [WEIGHTED.fullmatch(part) for part in parts]
    if os.path.lexists(given) or not any(found):
        return [Source(given, Fraction(1))]
    weighted = []
    for part, match in zip(parts, found, strict=True):
        if match is None:
            raise ConfigError(f"{part}: no weight in {given}; write PATH=WEIGHT for each source")
        weighted.append((match[1], _weight(match[1], match[2])))
    total = sum(weight for _, weight in weighted)
    return [Source(path, weight / total) for path, weight in weighted]


def _weight(path: str, text: str) -> Fraction:
    try:
        weight = Fraction(text)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if weight <= 0:
        raise ConfigError(f"{path}: weight {text!r} is no number above 0; write {path}=1")
    return weight


# ---- the order of sources ----


def parts_of_period(shares: Sequence[Fraction]) -> list[int]:
    """Return the samples of each source in a period: exact, unless the period would be longer
    than LONGEST_PERIOD.
    """
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return [int(share * period) for share in shares]
    parts = [max(1, round(share * LONGEST_PERIOD)) for share in shares]
    largest = parts.index(max(parts))
    parts[largest] += LONGEST_PERIOD - sum(parts)
    return parts


@functools.cache
def turns(parts: tuple[int, ...]) -> np.ndarray:
    """Return the source of each sample of a period, int64 [sum(parts)].

    After n samples each source has had its share of n, give or take less than 1 (Tijdeman 1980,
    "The chairman assignment problem").  So in any n successive samples it is within 2.
    """
    period = sum(parts)
    slack = max(1, 2 * len(parts) - 2)
    owed = [0] * len(parts)  # share minus samples so far, in units of 1 / period
    order = np.zeros(period, np.int64)
    for n in range(period):
        owed = [debt + part for debt, part in zip(owed, parts, strict=True)]
        urgency = [
            (period * (slack - 1) - slack * debt) / part if slack * debt >= period else math.inf
            for debt, part in zip(owed, parts, strict=True)
        ]
        chosen = urgency.index(min(urgency))
        owed[chosen] -= period
        order[n] = chosen
    return order


class Mixture:
    """Reads any range of global samples of several sources; it has no state.  A single source
    has the samples of TrainLoader.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Source, Sequence[Shard]]],
        seq_len: int,
        seed: int,
        shifted: bool = False,
    ):
        self.sources = [source for source, _ in parts]
        self.shards = label(parts)
        self.seq_len = seq_len
        self.loaders = [
            TrainLoader(shards, seq_len, seed + i * SEED_STEP, shifted)
            for i, (_, shards) in enumerate(parts)
        ]
        self._parts = parts_of_period([source.share for source in self.sources])
        self._turns = turns(tuple(self._parts))
        self._first = seed % len(self._turns)
        numbers = np.arange(len(self._parts))
        self._before = np.cumsum(self._turns[:, None] == numbers, axis=0)  # [L, sources]

    def batch(self, first_sample: int, count: int) -> np.ndarray:
        which, number = self._places(first_sample, count)
        out = np.empty((count, self.seq_len + 1), np.int32)
        for i, loader in enumerate(self.loaders):
            mine = which == i
            if mine.any():
                out[mine] = loader.samples(number[mine])
        return out

    def place(self, sample: int) -> str:
        [which], [number] = self._places(sample, 1)
        return self.loaders[which].place(int(number))

    def _places(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sample, and the number of samples that it had before."""
        at = np.arange(first_sample, first_sample + count) + self._first
        period, slot = np.divmod(at, len(self._turns))
        which = self._turns[slot]
        had = period * np.array(self._parts)[which] + self._before[slot, which] - 1
        skipped = self._before[self._first, which] - (self._turns[self._first] == which)
        return which, had - skipped

    def describe(self, samples: int) -> Iterator[str]:
        """Yield a line for each source of several: tokens, and epochs of `samples` in all."""
        if len(self.sources) == 1:
            return
        for name, part, loader in zip(names(self.sources), self._parts, self.loaders, strict=True):
            share = part / sum(self._parts)
            tokens = sum(shard.count for shard in loader.windows.shards)
            epochs = samples * share / loader.windows.n
            yield (
                f"data.train {name}: {100 * share:.4g}% of the sequences, "
                f"{epochs:.3g} epochs of {tokens:,} tokens"
            )


def label(parts: Sequence[tuple[Source, Sequence[Shard]]]) -> list[Shard]:
    """Return all shards; those of several sources get source and share into their fingerprints."""
    for i, (source, shards) in enumerate(parts):
        for shard in shards:
            shard.mixed = {"source": i, "share": str(source.share)} if len(parts) > 1 else {}
    return [shard for _, shards in parts for shard in shards]


def names(given: Sequence[Source]) -> list[str]:
    """Return a name for each source, a number behind one that others have."""
    found = [source.name for source in given]
    return [
        name if found.count(name) == 1 else f"{name}_{found[:i].count(name) + 1}"
        for i, name in enumerate(found)
    ]


# ---- validation ----


def validation_tokens(share: Fraction, shards: Sequence[Shard], seq_len: int, tokens: int) -> int:
    """Return a source's part of the tokens: as many as it has, if that is fewer."""
    if share == 1 or not tokens:
        return tokens
    there = sum((shard.count - 1) // seq_len for shard in shards) * seq_len
    return min(there, max(seq_len, int(tokens * share)))


class Validation:
    """The validation tokens of each source; `tokens` in all, divided by share."""

    def __init__(self, parts: Sequence[tuple[Source, Sequence[Shard]]], seq_len: int, tokens: int):
        self.shards = label(parts)
        self.names = names([source for source, _ in parts])
        self.shares = [float(source.share) for source, _ in parts]
        self.loaders = [
            ValidationLoader(
                shards, seq_len, validation_tokens(source.share, shards, seq_len, tokens)
            )
            for source, shards in parts
        ]

    def mean(self, losses: Sequence[float]) -> float:
        """Return the loss of all sources, weighted by share."""
        if len(losses) == 1:
            return losses[0]
        return sum(share * loss for share, loss in zip(self.shares, losses, strict=True))

    def shapes(self, rows: int) -> set[tuple[int, int]]:
        """Return (sequences, seq_len) of all sources' batches."""
        return {shape for loader in self.loaders for shape in loader.shapes(rows)}

    def describe(self) -> Iterator[str]:
        """Yield a line for each source of several."""
        if len(self.loaders) == 1:
            return
        for name, share, loader in zip(self.names, self.shares, self.loaders, strict=True):
            yield f"data.val {name}: {100 * share:.4g}% of the loss, from {loader.tokens:,} tokens"
