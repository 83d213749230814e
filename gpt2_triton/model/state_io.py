"""Maps a model's state buffers to the tensors of a checkpoint.  Their names, shapes and order do
not depend on the number of ranks.

tensor   elements  buffer
params   N         State.params, without the padding between buckets
m        N         State.m
v        N         State.v; with Muon without the elements of the layers' matrices
low      N         State.master_low
window   2, Nw     State.window, the same on every rank and saved by rank 0
scale    Q         State.scale, in fp8 only; the same on every rank and saved by rank 0
history  Q, 16     State.history, likewise
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_triton.model import sharding
from gpt2_triton.model.tables import Extent, Part, State

EQUAL = {"window", "scale", "history"}  # on all ranks


def state_buffers(s: State) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, by the names of its tensors."""
    buffers = dict(
        params=s.params,
        m=s.m,
        v=s.v,
        low=s.master_low,
        window=s.window,
        scale=s.scale,
        history=s.history,
    )
    return {name: flat for name, flat in buffers.items() if flat is not None}


class Held(NamedTuple):
    """A contiguous part of a checkpoint's tensor that a rank holds."""

    first: int  # index of its first element in the tensor
    length: int
    start: int  # offset in the buffer


class SavedState:
    """The state of a rank as the tensors of a checkpoint."""

    def __init__(self, state: State, dims: dict[str, int], rank: int):
        self._buffers = state_buffers(state)
        self._dims = dims
        self._rank = rank

    def spec(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors without memory, on the device "meta"."""
        return {
            name: torch.empty(
                t.shape if name in EQUAL else (sum(_lengths(name, self._dims)),),
                dtype=t.dtype,
                device="meta",
            )
            for name, t in self._buffers.items()
        }

    def shards(self) -> dict[str, list[Tensor]]:
        """Return the slices of the buffers that this rank saves, in the order of
        `spans`; a single rank saves all.
        """
        owned = sharding.owned_shards(self._dims, self._rank)
        out = {}
        for name, flat in self._buffers.items():
            if name not in EQUAL:
                spans = ((start, p.length) for p, start in _in_buffer(name, owned))
                out[name] = [flat[at : at + n] for at, n in sharding.coalesce(spans)]
            elif self._rank == 0:
                out[name] = [flat]
        return out

    def spans(self) -> dict[str, list[list[int]]]:
        """Return, for a checkpoint's state.json, (flat index, elements) of this rank's slices,
        `second_shares` of Muon's `v`; empty for one rank.
        """
        if self._dims["ranks"] == 1:
            return {}
        shards = sharding.owned_shards(self._dims, self._rank)
        spans = {"shares": [[p.first, p.length] for p in shards]}
        with_v = [p for p in shards if "v" in p.states]
        if len(with_v) < len(shards):
            spans["second_shares"] = [[_first("v", p, self._dims), p.length] for p in with_v]
        return spans

    def held(self) -> dict[str, list[Held]]:
        """Return what this rank holds of each tensor: all of `params`, and what
        it updates of m, v and low.
        """
        updated = sharding.updated_shards(self._dims, self._rank)
        everything = sharding.updated_shards(self._dims | dict(zero=0), self._rank)
        out = {}
        for name, flat in self._buffers.items():
            if name in EQUAL:
                out[name] = [Held(0, flat.numel(), 0)]
            else:
                shards = everything if name == "params" else updated
                out[name] = [
                    Held(_first(name, p, self._dims), p.length, start)
                    for p, start in _in_buffer(name, shards)
                ]
        return out

    def needs(self) -> dict[str, list[Extent]]:
        """Return (index, elements) of what a load of each tensor needs."""
        return {name: [(h.first, h.length) for h in held] for name, held in self.held().items()}

    def load(self, parts: Iterable[Part]) -> None:
        """Fill the buffers from parts of a checkpoint's tensors.  A rank copies what it holds.

        A checkpoint of the head in bf16 has fewer scales of fp8 than this model
        may need: then none is loaded.
        """
        buffers = {name: flat.view(-1) for name, flat in self._buffers.items()}
        places = self.held()
        for name, first, elements in parts:
            if name in EQUAL and len(elements) < len(buffers[name]):
                continue
            for place in places[name]:
                begin = max(first, place.first)
                end = min(first + len(elements), place.first + place.length)
                if begin < end:
                    start = place.start + begin - place.first
                    buffers[name][start : start + end - begin].copy_(
                        elements[begin - first : end - first]
                    )

    def digest(self) -> str:
        """Return the sha256 of the weights in flat order, and of the moments if
        every rank holds all of them.
        """
        digest = hashlib.sha256()
        held = self.held()
        names = ["params"]
        if not self._dims["zero"]:
            names += ["m", "v", "low"]
        for name in names:
            for h in held.get(name, ()):
                part = self._buffers[name][h.start : h.start + h.length]
                digest.update(part.cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _first(name: str, p: sharding.Shard, dims: dict[str, int]) -> int:
    """Return the index of a shard's first element in a checkpoint's tensor."""
    begin = p.first - sharding.buckets(dims)[p.bucket].first
    return sum(_lengths(name, dims)[: p.bucket]) + begin


def _lengths(name: str, dims: dict[str, int]) -> list[int]:
    """Return how many elements of a checkpoint's tensor each bucket has."""
    buckets = sharding.buckets(dims)
    return [b.length if name in ("params", *b.states) else 0 for b in buckets]


def _in_buffer(name: str, shards: Iterable[sharding.Shard]) -> Iterator[tuple[sharding.Shard, int]]:
    """Yield the shards that are in the buffer of this tensor, and their offsets there."""
    for p in shards:
        start = p.param if name == "params" else p.states.get(name)
        if start is not None:
            yield p, start
