"""Layout of the flat buffers on each rank, for any number of ranks and ZeRO stage (Rajbhandari et
al. 2020, https://arxiv.org/abs/1910.02054).

A bucket is a contiguous part of the flat order; its gradients are complete at about the same time.
Bucket 0 is the embedding (wte, and wpe or lmhead), 1 + l is layer l, and the last holds norms and
biases.  Each bucket is padded to a multiple of the number of ranks, and its r-th part is rank r's
shard.  The padding is never read.  Flat indices leave the padding out; rounding noise and
checkpoints use flat indices.  A single rank has no padding.

stage   m, v, low     gradients
0       all           all, summed over ranks in place
1       own shards    all; the rank's own shards are summed in place
2       own shards    embedding, norms and biases, and two layers; the sums of own shards
                      go to `reduced`
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from gpt2_triton.model.optimizers import ADAMW, OPTIMIZERS, Optimizer
from gpt2_triton.model.tables import State

# divides a shard's length: shards begin at sectors (128 bytes of bf16) and whole Philox calls
ALIGNMENT = 64


# a communicator's number for everything outside the layers' matrices: embeddings, norms and biases
NOT_A_LAYER = -1


class Bucket(NamedTuple):
    """Parameters that ranks exchange together: embeddings, a layer, or norms and biases."""

    first: int  # flat index
    length: int  # parameters
    start: int  # offset in the padded parameters
    padded: int  # elements there
    optimizer: Optimizer
    # where it begins in the buffers of the optimizer's states, and in "low": at stage 0 the whole
    # bucket, else a rank's shard of it
    states: dict[str, int]


class Shard(NamedTuple):
    """A contiguous part of a bucket and its offsets in the flat buffers."""

    bucket: int
    first: int  # flat index
    length: int
    param: int  # offset in `params`
    states: dict[str, int]  # in the buffer of each of the optimizer's states, and in "low"
    grad: int  # in `grads`, at stage 2 in `reduced`
    optimizer: Optimizer

    def of(self, buffer: Tensor, state: str) -> Tensor:
        """Return this shard's part of the buffer of a state."""
        return buffer[self.states[state] :][: self.length]


def buckets(dims: dict[str, int]) -> list[Bucket]:
    """Return the buckets for dims["ranks"] ranks, in the flat order."""
    L = dims["L"]
    ranks = dims["ranks"]
    alignment = 1 if ranks == 1 else ranks * ALIGNMENT
    share = ranks if dims["zero"] else 1  # of the optimizer's states
    layer = dims["Nl"], OPTIMIZERS[dims["optimizer"]]
    rest = dims["N"] - dims["Ne"] - L * dims["Nl"]
    first = start = 0
    ends = dict[str, int]()
    out = []
    for length, optimizer in [(dims["Ne"], ADAMW), *[layer] * L, (rest, ADAMW)]:
        padded = -(-length // alignment) * alignment
        states = {state: ends.get(state, 0) for state in (*optimizer.states, "low")}
        out.append(Bucket(first, length, start, padded, optimizer, states))
        first += length
        start += padded
        ends |= {state: at + padded // share for state, at in states.items()}
    return out


def grad_offsets(dims: dict[str, int]) -> list[int]:
    """Return each bucket's offset in `grads`; at stage 2 even layers share one
    place and odd layers another.
    """
    all_buckets = buckets(dims)
    if dims["zero"] < 2:
        return [b.start for b in all_buckets]
    embed, layer, *_, rest = all_buckets
    layers = [embed.padded + rest.padded + (l % 2) * layer.padded for l in range(dims["L"])]
    return [0, *layers, embed.padded]


def flat_buffer_sizes(dims: dict[str, int], training: bool, master: bool) -> dict[str, int]:
    """Return the elements of the flat buffers; Nx: a shard of the largest bucket from each
    other rank.
    """
    all_buckets = buckets(dims)
    zero = dims["zero"]
    full = sum(b.padded for b in all_buckets)
    layer = all_buckets[1].padded
    share = dims["ranks"] if zero else 1  # of the optimizer's states
    grads = (
        full
        if zero < 2
        else all_buckets[0].padded + all_buckets[-1].padded + min(dims["L"], 2) * layer
    )
    out = dict(Nm=full // share if master else 0, Ng=grads)
    out["Nr"] = full // dims["ranks"] if zero == 2 else 0
    for size, state in (("Nt", "m"), ("Nv", "v")):
        out[size] = sum(b.padded for b in all_buckets if state in b.optimizer.states) // share
    out["Nx"] = max(b.padded for b in all_buckets) // dims["ranks"] * (dims["ranks"] - 1)
    out["No"] = sum(b.length for b in all_buckets if b.optimizer.matrices)
    if not training:
        out = dict.fromkeys(out, 0)
    return out | dict(Nf=full)


def owned_shards(dims: dict[str, int], rank: int) -> list[Shard]:
    """Return `rank`'s shards, one per bucket, maybe empty: for norms, checkpoints, and
    the update at stages 1, 2.
    """
    out = []
    own = 0  # offset of this bucket's shard among the rank's shards
    zero = dims["zero"]
    for i, b in enumerate(buckets(dims)):
        part = b.padded // dims["ranks"]
        begin = min(rank * part, b.length)
        offset = b.start + rank * part
        n = min(part, b.length - begin)
        states = {state: at + (0 if zero else rank * part) for state, at in b.states.items()}
        grad = own if zero == 2 else offset
        out.append(Shard(i, b.first + begin, n, offset, states, grad, b.optimizer))
        own += part
    return out


def updated_shards(dims: dict[str, int], rank: int) -> list[Shard]:
    """Return what `rank` updates: its own shards, or at stage 0 all parameters: the
    embedding, the layers, the rest.
    """
    if dims["zero"]:
        shards = owned_shards(dims, rank)
        # the order in which the next forward pass needs them
        return [shards[0], shards[-1], *shards[1:-1]]
    out: list[Shard] = []
    for i, b in enumerate(buckets(dims)):
        last = out[-1] if out else None
        is_layer = i <= dims["L"]
        if last and last.bucket and is_layer and last.param + last.length == b.start:
            out[-1] = last._replace(length=last.length + b.length)
        else:
            whole = Shard(i, b.first, b.length, b.start, b.states, b.start, b.optimizer)
            out.append(whole)
    return out


def reduced_gradients(state: State) -> Tensor:
    """Return the buffer in which this rank finds the gradients summed over ranks."""
    return state.grads if state.reduced is None else state.reduced


def coalesce(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent spans (start, length) and leave out empty ones."""
    out: list[tuple[int, int]] = []
    end = -1
    for start, length in spans:
        if start == end:
            start, before = out.pop()
            length += before
        if length:
            out.append((start, length))
            end = start + length
    return out
