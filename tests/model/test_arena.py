"""The planner: buffers that are live together never share bytes, and views
are as the tables declare.
"""

import dataclasses
import doctest
import inspect
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpt2_triton.config.values import check_recompute
from gpt2_triton.model.arena import (
    ALIGN,
    PHASES,
    Buffer,
    BufferSpec,
    buf,
    carve,
    place_buffers,
    resolve_buffers,
)
from gpt2_triton.model.gpt2.buffers import Acts
from gpt2_triton.model.memory_plan import bytes_by_kind
from gpt2_triton.model.recompute import layer_levels
from gpt2_triton.model.tables import State

DTYPES = dict(act=torch.bfloat16, i32=torch.int32, i16=torch.int16) | dict.fromkeys(
    ("f32", "m", "v"), torch.float32
)

one_phase = st.sampled_from(PHASES)
spans = st.tuples(one_phase, one_phase).map(lambda ends: "..".join(sorted(ends, key=PHASES.index)))
lives = st.lists(st.one_of(one_phase, spans), min_size=1, max_size=3).map(" ".join)


def buffer(name: str, n: int, live: str, copies: int = 1, within: str = "") -> Buffer:
    """Return a buffer of n float32, or a list of `copies` such buffers."""
    spec = BufferSpec(str(n), "f32", live, "kind", within=within)
    return Buffer(
        name, spec, (n,), torch.float32, live, tuple(range(copies)) if copies > 1 else None
    )


tables = st.lists(
    st.tuples(st.integers(1, 2000), lives, st.integers(1, 4)), min_size=1, max_size=25
).map(lambda rows: [buffer(f"r{i}", *row) for i, row in enumerate(rows)])


@pytest.mark.parametrize("member", [buf, layer_levels, check_recompute])
def test_examples_in_docstrings_of_its_module_hold(member):
    result = doctest.testmod(inspect.getmodule(member))
    assert result.failed == 0 and result.attempted > 0


@given(tables)
def test_place_buffers_never_overlaps_buffers_of_one_phase(table):
    plan = place_buffers(table)
    for a, b in itertools.combinations(plan.buffers.values(), 2):
        apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
        assert apart or not a.phases & b.phases, (a, b)


@given(tables)
def test_place_buffers_aligns_and_ends_with_the_last_buffer(table):
    plan = place_buffers(table)
    assert all(
        b.offset % ALIGN == 0 and b.copy_bytes % ALIGN == 0 and b.offset >= 0
        for b in plan.buffers.values()
    )
    assert plan.total == max(b.offset + b.nbytes for b in plan.buffers.values())
    busiest = max(sum(b.nbytes for b in table if phase in b.phases) for phase in PHASES)
    assert busiest <= plan.total <= sum(b.nbytes for b in table)


@given(tables)
def test_carved_views_keep_their_values_while_others_are_written(table):
    """In each phase fill every copy of every live buffer with its own
    number; all of them stay intact.
    """
    plan = place_buffers(table)
    memory = torch.empty(plan.total, dtype=torch.uint8)
    fields = [(b.name, Tensor, buf(b.spec.shape, "f32", b.live, "kind")) for b in table]
    views = carve(dataclasses.make_dataclass("Table", fields), plan, memory, {})
    for phase in PHASES:
        live = [(i, getattr(views, b.name)) for i, b in enumerate(table) if phase in b.phases]
        copies = [
            (i, j, t) for i, v in live for j, t in enumerate(v if isinstance(v, list) else [v])
        ]
        for i, j, t in copies:
            t.fill_(100 * i + j)
        assert all((t == 100 * i + j).all() for i, j, t in copies)


def test_place_buffers_shares_bytes_of_disjoint_lifetimes():
    plan = place_buffers(
        [
            buffer("a", 1000, "embed"),
            buffer("b", 500, "block..head"),
            buffer("c", 500, "block block_bwd"),
        ]
    )
    assert plan.buffers["a"].offset == 0 and plan.total == 4096  # b and c together fit where a was


def test_a_buffer_within_another_takes_its_bytes_or_where_they_are_too_few_its_own():
    guest = buffer("guest", 50, "block_bwd", within="host")
    plan = place_buffers(
        [buffer("host", 100, "head..update"), guest, buffer("other", 100, "update")]
    )
    assert plan.buffers["guest"].offset == plan.buffers["host"].offset
    assert plan.total == 1024 and bytes_by_kind(plan) == {"kind": 1024}
    plan = place_buffers([buffer("host", 100, "head"), buffer("guest", 129, "head", within="host")])
    assert plan.total == 512 + 768 and bytes_by_kind(plan) == {"kind": 1280}
    with pytest.raises(AssertionError, match="guest outlives host"):
        place_buffers(
            [buffer("host", 100, "head"), buffer("guest", 100, "head..update", within="host")]
        )


ABSENT = "Nm Nr Nx No Nc Q P Sa Sp As dropout"  # without elements
FLAT = "N Nt Nv Nf Ng"
DIMS = dict.fromkeys(ABSENT.split(), 0) | dict.fromkeys(FLAT.split(), 100)
DIMS |= dict(B=2, T=8, R=16, C=32, Cq=32, D=96, F=128, G=128, NH=1, L=3, S=7, Vp=128, Rc=16)
DIMS |= dict(Np=64, W=1000, Nw=129, trains=1, bf16=1, bf16_head=1)
LAYERS = {  # recompute level, distinct buffers of x, ln, qkv, att, fch and fcg with three layers
    "none": [7, 6, 3, 3, 3, 3],
    "gelu:1": [7, 6, 3, 3, 3, 2],  # the first layer uses the second's
    "gelu:2": [7, 6, 3, 3, 3, 1],
    "gelu": [7, 6, 3, 3, 3, 1],
    "gelu+ln:2": [7, 2, 3, 3, 3, 1],
    "gelu+ln": [7, 1, 3, 3, 3, 1],
    "gelu+ln+qkv:1": [7, 1, 2, 3, 3, 1],
    "gelu+ln+qkv": [7, 1, 1, 3, 3, 1],
    "block:1": [6, 1, 1, 2, 2, 1],
    "block": [5, 1, 1, 1, 1, 1],
}


@pytest.mark.parametrize("level", LAYERS)
def test_lists_share_the_copies_that_their_level_drops(level):
    levels = layer_levels(level, 3)
    resolved = [b for table in (State, Acts) for b in resolve_buffers(table, DIMS, DTYPES, levels)]
    plan = place_buffers(resolved)
    acts = carve(Acts, plan, torch.empty(plan.total, dtype=torch.uint8), DIMS)
    lists = (acts.x, acts.ln, acts.mean, acts.qkv, acts.fch, acts.fcg)
    assert [*map(len, lists)] == [7, 6, 7, 3, 3, 3]
    distinct = [
        len({t.data_ptr() for t in row})
        for row in (acts.x, acts.ln, acts.qkv, acts.att, acts.fch, acts.fcg)
    ]
    assert distinct == LAYERS[level]
    assert "master_low" not in plan.buffers  # Nm = 0: a buffer without elements is left out


def test_layers_without_a_copy_use_that_of_the_first_layer_with_one():
    """In the forward pass they need it before that layer does, in the backward pass after it."""
    dims = DIMS | dict(L=4, S=9)

    def resolved(level: str) -> dict[str, Buffer]:
        return {b.name: b for b in resolve_buffers(Acts, dims, DTYPES, layer_levels(level, 4))}

    found = resolved("gelu+ln+qkv:2")
    assert found["qkv"].copy_of == (0, 0, 0, 1) and found["qkv"].live == "block..block_bwd"
    assert found["ln"].copy_of == (0,) * 8 and found["ln"].live == "block block_bwd"
    assert resolved("block:2")["x"].copy_of == (0, 3, 1, 3, 2, 3, 4, 5, 6)
    assert resolved("gelu+ln:3")["ln"].copy_of == (0, 0, 0, 0, 0, 0, 0, 1)


def test_carve_makes_smaller_views_and_refuses_larger_ones():
    table = dataclasses.make_dataclass("Table", [("x", Tensor, buf("R C", "f32", "head", "kind"))])
    plan = place_buffers(resolve_buffers(table, dict(R=8, C=4), DTYPES, []))
    memory = torch.empty(plan.total, dtype=torch.uint8)
    assert carve(table, plan, memory, dict(R=3, C=4)).x.shape == (3, 4)
    with pytest.raises(AssertionError, match="exceeds the planned"):
        carve(table, plan, memory, dict(R=9, C=4))
