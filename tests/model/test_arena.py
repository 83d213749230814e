"""The planner: rows that live together never share bytes, views are as the table says, too large a plan is refused."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gpt2_triton.model.gpt2
import gpt2_triton.model.memory_plan
from gpt2_triton.config.schema import RECOMPUTE_LEVELS
from gpt2_triton.errors import OutOfMemoryError
from gpt2_triton.model import arena
from gpt2_triton.model.arena import ALIGN, PHASES, Row, buf, carve, largest_batch, phases, plan, resolve
from gpt2_triton.model.buffers import Acts, State, layer_levels
from gpt2_triton.model.memory_plan import choose_recompute
from tests.support import reference
from tests.support.tiny import tiny_config

DTYPES = dict(act=torch.bfloat16, f32=torch.float32, i32=torch.int32, i16=torch.int16)

one_phase = st.sampled_from(PHASES)
spans = st.tuples(one_phase, one_phase).map(lambda ends: "..".join(sorted(ends, key=PHASES.index)))
lives = st.lists(st.one_of(one_phase, spans), min_size=1, max_size=3).map(" ".join)


def row(name: str, n: int, live: str, copies: int = 1, within: str = "") -> Row:
    slots = tuple(range(copies)) if copies > 1 else None
    return Row(name, str(n), (n,), torch.float32, live, "kind", within, slots, copies)


tables = st.lists(st.tuples(st.integers(1, 2000), lives, st.integers(1, 4)), min_size=1, max_size=25).map(
    lambda specs: [row(f"r{i}", *spec) for i, spec in enumerate(specs)]
)


@given(tables)
def test_rows_that_live_in_one_phase_never_overlap(rows):
    made = plan(rows)
    for a, b in itertools.combinations(made.rows.values(), 2):
        apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
        assert apart or not a.phases & b.phases, (a, b)


@given(tables)
def test_a_plan_is_aligned_and_as_long_as_its_last_row(rows):
    made = plan(rows)
    assert all(r.offset % ALIGN == 0 and r.copy_bytes % ALIGN == 0 and r.offset >= 0 for r in made.rows.values())
    assert made.total == max(r.offset + r.nbytes for r in made.rows.values())
    busiest = max(sum(r.nbytes for r in rows if phase in r.phases) for phase in PHASES)
    assert busiest <= made.total <= sum(r.nbytes for r in rows)


@given(tables)
def test_live_views_hold_their_values_while_others_are_written(rows):
    """Carve a table from the plan, fill every row live in a phase with its own number, and find all of them intact."""
    made = plan(rows)
    memory = torch.empty(made.total, dtype=torch.uint8)
    table = dataclasses.make_dataclass("Table", [(r.name, Tensor, buf(r.spec, "f32", r.live, "kind")) for r in rows])
    views = carve(table, made.rows, memory, {})
    for phase in PHASES:
        live = [(i, getattr(views, r.name)) for i, r in enumerate(rows) if phase in r.phases]
        pieces = [(i, j, t) for i, v in live for j, t in enumerate(v if isinstance(v, list) else [v])]
        for i, j, t in pieces:
            t.fill_(100 * i + j)
        assert all((t == 100 * i + j).all() for i, j, t in pieces)


def test_rows_with_disjoint_lifetimes_share_bytes():
    made = plan([row("a", 1000, "embed"), row("b", 500, "block..head"), row("c", 500, "block block_bwd")])
    assert made.rows["a"].offset == 0 and made.total == 4096  # b and c together fit where a was


def test_a_row_within_another_takes_its_bytes_and_no_more():
    guest = row("guest", 50, "block_bwd", within="host")
    made = plan([row("host", 100, "head..update"), guest, row("other", 100, "update")])
    assert made.rows["guest"].offset == made.rows["host"].offset
    assert made.total == 1024 and made.by_kind() == {"kind": 1024}
    with pytest.raises(AssertionError, match="guest does not fit in host"):
        plan([row("host", 100, "head"), row("guest", 129, "head", within="host")])
    with pytest.raises(AssertionError, match="guest does not fit in host"):
        plan([row("host", 100, "head"), row("guest", 100, "head..update", within="host")])


def test_phases_reads_uses_and_spans():
    assert phases("block block_bwd") == {"block", "block_bwd"}
    assert phases("head..update") == {"head", "block_bwd", "update"}
    assert phases("embed..between") == set(PHASES)


LAYERS = {  # recompute level, distinct buffers of x, ln, qkv, att, fch and fcg with three layers
    "none": [7, 6, 3, 3, 3, 3],
    "gelu:1": [7, 6, 3, 3, 3, 2],  # the first layer has the second's
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
def test_a_list_has_one_view_an_entry_and_shares_what_its_level_drops(level):
    dims = dict(B=2, T=8, R=16, C=32, NH=1, L=3, S=7, Vp=128, Rc=16, N=100, Nt=100, Nm=0, Np=64, W=1000)
    dims |= dict(Nw=129, Sa=0, Sp=0, P=0, Nf=100, Ng=100, Nr=0, Nx=0)
    levels = layer_levels(level, 3)
    rows = {r.name: r for table in (State, Acts) for r in resolve(table, dims, DTYPES, levels, RECOMPUTE_LEVELS)}
    made = plan(list(rows.values()))
    acts = carve(Acts, rows, torch.empty(made.total, dtype=torch.uint8), dims)
    assert [len(v) for v in (acts.x, acts.ln, acts.mean, acts.qkv, acts.fch, acts.fcg)] == [7, 6, 7, 3, 3, 3]
    distinct = [len({t.data_ptr() for t in row}) for row in (acts.x, acts.ln, acts.qkv, acts.att, acts.fch, acts.fcg)]
    assert distinct == LAYERS[level]
    assert "low" not in rows  # Nm = 0: a row of no elements is left out


def test_a_smaller_view_fits_and_a_larger_one_is_refused():
    table = dataclasses.make_dataclass("Table", [("x", Tensor, buf("R C", "f32", "head", "kind"))])
    rows = {r.name: r for r in resolve(table, dict(R=8, C=4), DTYPES, [], RECOMPUTE_LEVELS)}
    memory = torch.empty(plan(list(rows.values())).total, dtype=torch.uint8)
    assert carve(table, rows, memory, dict(R=3, C=4)).x.shape == (3, 4)
    with pytest.raises(AssertionError, match="exceeds the planned"):
        carve(table, rows, memory, dict(R=9, C=4))


def test_the_plan_prints_every_buffer_and_the_total():
    made = plan([row("weights", 1 << 20, "embed..between"), row("p", 1 << 18, "head"), row("q", 1 << 18, "block")])
    text = made.show()
    assert all(name in text for name in made.rows)
    assert "arena 5.0 MiB" in text and "1.0 MiB saved by sharing" in text


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 100_000))
def test_largest_batch_is_the_largest_that_fits(per_row, fixed, budget):
    def total(B: int) -> int:
        return fixed + per_row * B

    best = largest_batch(total, budget)
    assert total(best + 1) > budget
    assert best == 0 or total(best) <= budget


def test_a_run_that_cannot_fit_names_the_largest_batch_that_would(monkeypatch):
    config = tiny_config()
    made, _ = gpt2_triton.model.memory_plan.plan_memory(config, reference, 1, config.train.seq_len)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (made.total, 2 * arena.GIB))
    with pytest.raises(OutOfMemoryError, match=r"set train.batch_size to 1 and .* \(now batch 2, gelu\)"):
        gpt2_triton.model.gpt2.GPT2(config, reference, "cuda")
    with pytest.raises(
        OutOfMemoryError, match=r"^to decode 900 texts at once takes .* GiB free: set --batch below 900$"
    ):
        gpt2_triton.model.gpt2.GPT2(config, reference, "cuda", batch=57, training=False, texts=900)
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": made.total}.__getitem__)
    with pytest.raises(OutOfMemoryError, match=r"the machine has .* GiB: set train.batch_size to 1 and "):
        gpt2_triton.model.gpt2.GPT2(config, reference, "cpu")


def test_the_batch_that_would_fit_divides_a_gpus_share_of_the_step(monkeypatch):
    """12 sequences a step on 4 GPUs: batches of 2 would fit, and do not divide the 3 of each."""
    config = tiny_config(train=dict(batch_size=3, total_batch_tokens=192)).with_gpus(4)
    fits, _ = gpt2_triton.model.memory_plan.plan_memory(config, reference, 2, config.train.seq_len)
    made, _ = gpt2_triton.model.memory_plan.plan_memory(config, reference, 3, config.train.seq_len)
    assert made.total > fits.total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (fits.total, 2 * arena.GIB))
    with pytest.raises(OutOfMemoryError, match="set train.batch_size to 1 and train.total_batch_tokens to 192"):
        gpt2_triton.model.memory_plan.require_fits(made, config, reference, "cuda")


def test_layers_that_keep_nothing_have_the_copy_of_the_first_that_does():
    """Which is of use before it forward, and after it backward."""
    dims = dict(B=2, T=8, R=16, C=32, NH=1, L=4, S=9, Vp=128, Rc=16, W=1000)
    rows = {r.name: r for r in resolve(Acts, dims, DTYPES, layer_levels("gelu+ln+qkv:2", 4), RECOMPUTE_LEVELS)}
    assert rows["qkv"].slots == (0, 0, 0, 1) and rows["qkv"].live == "block..block_bwd"
    assert rows["ln"].slots == (0,) * 8 and rows["ln"].live == "block block_bwd"
    rows = {r.name: r for r in resolve(Acts, dims, DTYPES, layer_levels("block:2", 4), RECOMPUTE_LEVELS)}
    assert rows["x"].slots == (0, 3, 1, 3, 2, 3, 4, 5, 6)
    rows = {r.name: r for r in resolve(Acts, dims, DTYPES, layer_levels("gelu+ln:3", 4), RECOMPUTE_LEVELS)}
    assert rows["ln"].slots == (0, 0, 0, 0, 0, 0, 0, 1)


def test_recompute_auto_is_the_first_level_in_as_few_layers_as_fit():
    config = tiny_config(model=dict(n_layer=3), memory=dict(recompute="auto"))

    def total(level):
        at_level = config.replace(memory={"recompute": level})
        return gpt2_triton.model.memory_plan.plan_memory(at_level, reference, 2, config.train.seq_len)[0].total

    every = [f"{level}:{n}".removesuffix(":3") for level in RECOMPUTE_LEVELS[1:] for n in (1, 2, 3)]
    totals = {level: total(level) for level in ("none", *every)}
    assert list(totals.values()) == sorted(totals.values(), reverse=True)
    first = {bytes_: level for level, bytes_ in reversed(totals.items())}
    assert len(first) > 2 * len(RECOMPUTE_LEVELS)
    for budget, level in first.items():
        assert choose_recompute(config, reference, budget).memory.recompute == level
    assert choose_recompute(config, reference, totals["block"] - 1).memory.recompute == "block"
    named = config.replace(memory={"recompute": "gelu"})
    assert choose_recompute(named, reference, 0) is named


def test_recompute_auto_fits_where_a_deeper_level_takes_more():
    """With one layer `block` keeps as much as the level before, and needs GELU's output in the backward pass too."""
    model, train = dict(n_layer=1, vocab_size=512), dict(batch_size=16, total_batch_tokens=256)
    config = tiny_config(model=model, train=train, memory=dict(recompute="auto"))

    def total(level):
        at_level = config.replace(memory={"recompute": level})
        return gpt2_triton.model.memory_plan.plan_memory(at_level, reference, 16, 16)[0].total

    budget = total("gelu+ln+qkv")
    assert budget < min(total("gelu+ln"), total("block"))
    assert total(choose_recompute(config, reference, budget).memory.recompute) <= budget


def test_a_model_that_only_runs_forward_has_no_level_to_choose():
    """Checkpoints of a run with `auto` say so: samples and scores of it need no choice."""
    config, T = tiny_config(memory=dict(recompute="auto")), 16
    totals = [
        gpt2_triton.model.memory_plan.plan_memory(c, reference, 2, T, training=False)[0].total
        for c in (config, config.replace(memory={"recompute": "none"}))
    ]
    assert totals[0] == totals[1]
