"""Sharding: each parameter belongs to one rank, for any number of ranks and any stage."""

import numpy as np
import pytest

from gpt2_triton.model import sharding
from gpt2_triton.model.optimizers import ADAMW, OPTIMIZERS

# few ranks divide them, and the rest of 1,968
SIZES = dict(L=3, C=48, N=91_536, Ne=6_624, Nl=27_648, optimizer=OPTIMIZERS.index(ADAMW))
RANKS = (1, 2, 3, 4, 7, 64, 1000)


def dims_of(ranks, zero):
    dims = SIZES | dict(ranks=ranks, zero=zero)
    return dims | sharding.flat_buffer_sizes(dims, True, True)


def are_all_parameters(spans):
    elements = np.concatenate([np.arange(p.first, p.first + p.length) for p in spans])
    return np.array_equal(np.sort(elements), np.arange(SIZES["N"]))


@pytest.mark.parametrize("zero", (0, 1, 2))
@pytest.mark.parametrize("ranks", RANKS)
def test_shards_cover_each_parameter_once_within_the_buffers(ranks, zero):
    dims = dims_of(ranks, zero)
    shards = [sharding.owned_shards(dims, rank) for rank in range(ranks)]
    assert are_all_parameters(spans := [p for own in shards for p in own])
    for p in spans:
        assert p.param + p.length <= dims["Nf"] and p.states["m"] + p.length <= dims["Nt"]
        assert p.grad + p.length <= (dims["Nr"] if zero == 2 else dims["Ng"])
        assert p.first % 4 == 0 or not p.length  # whole Philox calls: kernels/philox.py
    updated = [
        p for rank in range(1 if zero == 0 else ranks) for p in sharding.updated_shards(dims, rank)
    ]
    assert are_all_parameters(updated)


def test_one_rank_has_no_padding_and_updates_embedding_layers_and_rest():
    dims = dims_of(1, 0)
    assert dims["Nf"] == dims["Nt"] == dims["Ng"] == SIZES["N"] and dims["Nr"] == dims["Nx"] == 0
    embed, layers, rest = sharding.updated_shards(dims, 0)
    assert (
        embed.length == layers.first == layers.param
        and layers.first + layers.length == rest.first == rest.param
    )


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_flat_buffer_sizes_shrink_with_the_stage(ranks):
    zero0, zero1, zero2 = (dims_of(ranks, zero) for zero in (0, 1, 2))
    assert zero0["Nt"] == zero0["Nf"] == zero1["Nt"] * ranks and zero1["Ng"] == zero1["Nf"]
    embed, layer, *_, rest = sharding.buckets(zero2)
    assert (
        zero2["Ng"] == embed.padded + rest.padded + 2 * layer.padded
        and zero2["Nr"] * ranks == zero2["Nf"]
    )
    starts = sharding.grad_offsets(zero2)
    assert starts[1] == starts[3] != starts[2]  # two buffers for even and odd layers
    assert all(b.padded % (ranks * sharding.ALIGNMENT) == 0 for b in sharding.buckets(zero2))


# the largest bucket is a layer's, or the embedding's
@pytest.mark.parametrize("sizes", [SIZES, SIZES | dict(Vp=4096)])
@pytest.mark.parametrize("ranks", RANKS)
def test_received_holds_one_shard_of_the_largest_bucket_from_each_peer(sizes, ranks):
    dims = sizes | dict(ranks=ranks, zero=1)
    dims |= sharding.flat_buffer_sizes(dims, True, True)
    largest = max(b.padded for b in sharding.buckets(dims))
    assert dims["Nx"] * ranks == largest * (ranks - 1)
