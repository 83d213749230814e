"""A rank reads the spans that it holds, whatever the ranks and the ZeRO stage
of the run that saved them.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from gpt2_triton.checkpoint.format import FORMAT, STATE, tensors_name
from gpt2_triton.checkpoint.load import open_checkpoint
from gpt2_triton.model import sharding, state_io
from gpt2_triton.model.optimizers import ADAMW, MUON, OPTIMIZERS
from gpt2_triton.model.state_io import SavedState
from tests.support.checkpoints import whole

SMALL = dict(L=3, C=48, N=91_536, Ne=6_624, Nl=27_648)  # few ranks divide them
# 288 MB with moments and fp32 masters
LARGE = dict(L=1, C=64, N=24_000_064, Ne=8_000_000, Nl=16_000_000)
SLACK = 64 << 20  # bytes: headers, and what the kernel maps around a page
# ranks of the run that saved, and of the run that resumes
CHANGES = [(4, 4), (4, 2), (2, 4), (1, 4), (4, 1)]


def dims_of(sizes, ranks, zero, muon=False):
    dims = sizes | dict(ranks=ranks, zero=zero if ranks > 1 else 0)
    dims["optimizer"] = OPTIMIZERS.index(MUON if muon else ADAMW)
    return dims | sharding.flat_buffer_sizes(dims, True, True)


def empty_state(dims):
    return SimpleNamespace(
        params=torch.zeros(dims["Nf"], dtype=torch.bfloat16),
        m=torch.zeros(dims["Nt"]),
        v=torch.zeros(dims["Nv"]),
        master_low=torch.zeros(dims["Nm"], dtype=torch.int16),
        window=torch.zeros(2, 4),
        scale=None,
        history=None,
    )


def saved_by(directory, dims, values):
    """Write the files of all ranks, with these elements of each tensor as
    far as a rank holds them.
    """
    directory.mkdir()
    spans = []
    for rank in range(dims["ranks"]):
        state = empty_state(dims)
        saved = SavedState(state, dims, rank)
        saved.load([(name, 0, elements) for name, elements in values.items()])
        shards = saved.shards()
        joined = {
            name: parts[0] if len(parts) == 1 else torch.cat(parts)
            for name, parts in shards.items()
        }
        save_file(joined, directory / tensors_name(rank))
        spans.append(saved.spans())
    content = {"format": FORMAT} | {key: [own[key] for own in spans] for key in spans[0]}
    (directory / STATE).write_text(json.dumps(content))
    return directory


def resumed(checkpoint, dims, rank):
    """Return the buffers of a rank, and the bytes of what it was given."""
    state, count = empty_state(dims), 0
    saved = SavedState(state, dims, rank)
    for name, first, elements in checkpoint.parts(saved.needs()):
        count += elements.nbytes
        saved.load([(name, first, elements)])
    return state_io.state_buffers(state), count


def bytes_held(dims, rank):
    """Return the bytes of a rank's buffers in a checkpoint: all weights, and
    its part of m, v and low.
    """
    buffers = state_io.state_buffers(empty_state(dims))
    held = SavedState(empty_state(dims), dims, rank).held()
    return sum(
        place.length * buffers[name].element_size()
        for name, places in held.items()
        for place in places
    )


@pytest.fixture(scope="module")
def values():
    """Elements of each tensor; no two are equal in m and v."""
    n = SMALL["N"]
    params = (torch.arange(n) % 251).bfloat16()
    low = (torch.arange(n) % 30_011).to(torch.int16)
    return dict(
        params=params,
        m=torch.arange(1.0, n + 1),
        v=torch.arange(2.0, n + 2),
        low=low,
        window=torch.ones(8),
    )


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("then, now", CHANGES)
def test_a_rank_gets_the_bytes_that_it_holds_and_no_others(tmp_path, values, then, now, zero, muon):
    dims = dims_of(SMALL, now, zero, muon)
    given = values | dict(v=values["v"][: SMALL["N"] - dims["No"]])
    checkpoint = open_checkpoint(
        saved_by(tmp_path / "step", dims_of(SMALL, then, zero, muon), given)
    )
    for rank in range(now):
        expected = empty_state(dims)
        parts = [(name, 0, elements) for name, elements in given.items()]
        SavedState(expected, dims, rank).load(parts)
        found, count = resumed(checkpoint, dims, rank)
        for name, buffer in state_io.state_buffers(expected).items():
            assert torch.equal(found[name], buffer), name
        assert count == bytes_held(dims, rank)
    assert all(torch.equal(whole(checkpoint.tensors[name]).view(-1), given[name]) for name in given)


def mapped(directory: Path) -> int:
    """Return the bytes of this process's pages that are mapped from files of a directory."""
    size, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            is_ours = str(directory) in line
        elif first == "Rss:" and is_ours:
            size += int(rest.split()[0]) << 10
    return size


def read_by_calls() -> int:
    """Return the bytes that this process has got from the system's calls to read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.slow
@pytest.mark.parametrize("then, now, zero", [(4, 4, 1), (4, 2, 1), (2, 4, 2), (1, 4, 1), (4, 4, 0)])
def test_a_rank_maps_and_reads_its_own_part_of_the_files(tmp_path, then, now, zero):
    """As the kernel counts.  At stage 0 every rank holds all."""
    dims = dims_of(LARGE, now, zero)
    saved_by(tmp_path / "step", dims_of(LARGE, then, zero), {})
    before = read_by_calls()
    checkpoint = open_checkpoint(tmp_path / "step")
    assert mapped(tmp_path) < SLACK
    resumed(checkpoint, dims, rank=now - 1)
    most = bytes_held(dims, now - 1) + SLACK
    assert mapped(tmp_path) + read_by_calls() - before < most
    if zero:
        for tensor in checkpoint.tensors.values():
            whole(tensor)
        assert mapped(tmp_path) > most
