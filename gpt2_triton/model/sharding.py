"""Where the flat buffers lie on each rank, for any number of ranks and ZeRO stage (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054).

A bucket is a stretch of the flat order whose gradients are done at about the same time: embed, each layer, rest.  It is
padded to a multiple of the ranks, and rank r owns the r-th part of each, its share.  Padding lies between tensors and
is never read; the flat index, which keys rounding noise and checkpoints, does not count it.  A rank alone has none.

stage   m, v, low     gradients
0       all           all, summed over ranks in place
1       own share     all; the share is summed in place
2       own share     embed, rest and two layers, from which the sums go to the rank's share, `reduced`
"""

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from gpt2_triton.model.buffers import param_entries

ALIGNMENT = 64  # elements that parts are multiples of: 128 bytes of bf16, a sector boundary, and whole Philox calls


class Bucket(NamedTuple):
    first: int  # flat index
    length: int  # parameters
    start: int  # where it begins in the padded parameters
    padded: int  # elements there
    decay: bool


class Shard(NamedTuple):
    """A stretch of a bucket: where it lies in each flat buffer."""

    bucket: int
    first: int  # flat index
    length: int
    param: int
    moment: int
    grad: int  # in `grads`, of stage 2 in `reduced`
    decay: bool


def buckets(dims: dict[str, int]) -> list[Bucket]:
    """The buckets for dims["ranks"] ranks, in the flat order."""
    lengths, decays, alignment = [0] * (dims["L"] + 2), [False] * (dims["L"] + 2), _alignment(dims)
    for e in param_entries(dims):
        lengths[e.bucket] += math.prod(e.shape)
        decays[e.bucket] = e.decay
    padded = [-(-n // alignment) * alignment for n in lengths]
    firsts, starts = accumulate(lengths, initial=0), accumulate(padded, initial=0)
    return [Bucket(*row) for row in zip(firsts, lengths, starts, padded, decays)]


def _alignment(dims: dict[str, int]) -> int:
    return 1 if dims["ranks"] == 1 else dims["ranks"] * ALIGNMENT


def grad_offsets(dims: dict[str, int]) -> list[int]:
    """Where each bucket begins in `grads`; at stage 2 layers take two places in turn."""
    made = buckets(dims)
    if dims["zero"] < 2:
        return [b.start for b in made]
    embed, layer, rest = made[0], made[1], made[-1]
    places = [embed.padded + rest.padded + (l % 2) * layer.padded for l in range(dims["L"])]
    return [0, *places, embed.padded]


def flat_buffer_sizes(dims: dict[str, int], training: bool, master: bool) -> dict[str, int]:
    """Elements of the flat buffers: Nf parameters, Nt moments, Nm low bits, Ng gradients, Nr of them reduced, Nx
    received, room for one rank's part of the largest bucket from each of the others.
    """
    made, zero = buckets(dims), dims["zero"]
    full, layer = sum(b.padded for b in made), made[1].padded
    own = full // dims["ranks"]
    moments = own if zero else full
    grads = full if zero < 2 else made[0].padded + made[-1].padded + min(dims["L"], 2) * layer
    out = dict(Nf=full, Nt=moments, Nm=moments * master, Ng=grads, Nr=own * (zero == 2))
    out["Nx"] = max(b.padded for b in made) // dims["ranks"] * (dims["ranks"] - 1)
    return {name: n * (training or name == "Nf") for name, n in out.items()}


def owned_shards(dims: dict[str, int], rank: int) -> list[Shard]:
    """The part of each bucket that `rank` squares, saves and, from stage 1 on, updates; some may be empty."""
    out, own, zero = [], 0, dims["zero"]
    for i, b in enumerate(buckets(dims)):
        part = b.padded // dims["ranks"]
        begin = min(rank * part, b.length)
        at = b.start + rank * part
        n = min(part, b.length - begin)
        moment, grad = own if zero else at, own if zero == 2 else at
        out.append(Shard(i, b.first + begin, n, at, moment, grad, b.decay))
        own += part
    return out


def updated_shards(dims: dict[str, int], rank: int) -> list[Shard]:
    """What `rank` updates: its share, or at stage 0 everything, in as few pieces as there can be."""
    if dims["zero"]:
        pieces = owned_shards(dims, rank)
        return [pieces[0], pieces[-1], *pieces[1:-1]]  # the order in which the next forward pass needs them
    out: list[Shard] = []
    for i, b in enumerate(buckets(dims)):
        last = out[-1] if out else None
        if last and last.decay == b.decay and last.param + last.length == b.start:
            out[-1] = last._replace(length=last.length + b.length)
        else:
            out.append(Shard(i, b.first, b.length, b.start, b.start, b.start, b.decay))
    return out


def coalesce(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, length) of stretches, those that follow one another joined, empty ones left out."""
    out: list[tuple[int, int]] = []
    for start, length in spans:
        if out and sum(out[-1]) == start:
            out[-1] = out[-1][0], out[-1][1] + length
        elif length:
            out.append((start, length))
    return out
