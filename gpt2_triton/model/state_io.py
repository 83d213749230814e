"""Maps a model's state buffers to the tensors of a checkpoint, whose names, shapes and order do not depend on the
number of ranks.

tensor   elements  buffer
params   N         State.params, without the padding between buckets
m, v     N         State.m, State.v
low      N         State.master_low
window   2, Nw     State.window, the same on every rank and saved by rank 0
scale    A         State.scale and State.history of a run in fp8, likewise
history  A, 16
"""

import hashlib

import torch
from torch import Tensor

from gpt2_triton.model import sharding
from gpt2_triton.model.buffers import State

EQUAL = {"window", "scale", "history"}  # on all ranks


def state_buffers(s: State) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, by the names of its tensors."""
    buffers = dict(params=s.params, m=s.m, v=s.v, low=s.master_low, window=s.window, scale=s.scale, history=s.history)
    return {name: flat for name, flat in buffers.items() if flat is not None}


def checkpoint_spec(s: State, dims: dict[str, int]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors without memory, on the device "meta"."""
    return {
        name: torch.empty(t.shape if name in EQUAL else (dims["N"],), dtype=t.dtype, device="meta")
        for name, t in state_buffers(s).items()
    }


def local_shards(s: State, dims: dict[str, int], rank: int) -> dict[str, list[Tensor]]:
    """Return the slices of the buffers that this rank saves, in the order of `shard_spans`; a single rank saves all."""
    buffers, owned = state_buffers(s), sharding.owned_shards(dims, rank)
    equal = {name: [buffers.pop(name)] for name in EQUAL & buffers.keys()}
    out = equal if rank == 0 else {}
    for name, flat in buffers.items():
        out[name] = [flat[at : at + n] for at, n in sharding.coalesce((_start(name, p), p.length) for p in owned)]
    return out


def shard_spans(dims: dict[str, int], rank: int) -> dict[str, list[list[int]]]:
    """Return, for a checkpoint's state.json, (flat index, elements) of each slice of the shards; empty for one rank."""
    return {"shares": [[p.first, p.length] for p in sharding.owned_shards(dims, rank)]} if dims["ranks"] > 1 else {}


def load(s: State, dims: dict[str, int], rank: int, tensors: dict[str, Tensor]) -> None:
    """Fill the buffers from a checkpoint's complete tensors, of which a rank copies the spans that it holds."""
    buffers = state_buffers(s)
    all_params, own = sharding.updated_shards(dims | dict(zero=0), rank), sharding.updated_shards(dims, rank)
    for name, tensor in tensors.items():
        if name in EQUAL:
            if name in buffers:  # not the scales of an fp8 run that continues in bf16
                buffers[name].copy_(tensor)
            continue
        for p in all_params if name == "params" else own:
            at = _start(name, p)
            buffers[name][at : at + p.length].copy_(tensor[p.first : p.first + p.length])


def state_digest(s: State, dims: dict[str, int]) -> str:
    """Return the sha256 of the weights in flat order, and of the moments if every rank holds all of them."""
    digest, buffers = hashlib.sha256(), state_buffers(s)
    names = ["params"] if dims["zero"] else ["params", "m", "v", "low"]
    for flat in (buffers[name] for name in names if name in buffers):
        for bucket in sharding.buckets(dims):
            part = flat[bucket.start : bucket.start + bucket.length]
            digest.update(part.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _start(name: str, p: sharding.Shard) -> int:
    return p.param if name == "params" else p.moment
