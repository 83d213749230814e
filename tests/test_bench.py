"""The benchmarks' accounting, without a GPU: every launcher of a step is known, and work adds up to the model's."""

import inspect

import numpy as np
import pytest

from gpt2_triton.kernels import contract
from tests.tiny import packed_batch, tiny_model

ops = pytest.importorskip("benchmarks.ops")
bench = pytest.importorskip("benchmarks.bench")


@pytest.fixture(scope="module")
def step():
    """(launcher, arguments) of one training step of a tiny model, and the model."""
    model, config = tiny_model(memory=dict(head_rows=16))
    contract.TRACE = []
    try:
        model.begin_step(np.zeros(8, np.float32), 0, 1)
        model.micro_step(packed_batch(config), first=True)
        model.end_step().result()
        trace = contract.TRACE
    finally:
        contract.TRACE = None
    import gpt2_triton.kernels as K

    calls = []
    for name, outputs, inputs in trace:
        names = list(inspect.signature(getattr(K, name)).parameters)
        calls.append((name, dict(zip(names, (*outputs, *inputs), strict=False))))
    return calls, model


def test_flops_of_a_step_are_six_for_each_weight_and_token_and_attentions(step):
    """2 flops forward and 4 backward for each matrix weight and token, the head's once; attention 7 half products."""
    calls, model = step
    d = model.dims
    weights = d["L"] * 12 * d["C"] ** 2 + d["Vp"] * d["C"]
    attention = 7 * d["B"] * d["T"] ** 2 * d["C"] * d["L"]
    assert sum(ops.flops(name, a) for name, a in calls) == 6 * weights * d["R"] + attention


def test_every_product_has_sizes_that_match_its_operands(step):
    calls, _ = step
    products = [(name, a) for name, a in calls if ops.product(name, a)]
    assert {name for name, _ in products} == ops.PRODUCTS.keys()
    for name, a in products:
        _, M, N, K = ops.product(name, a)
        assert ops.flops(name, a) == 2 * M * N * K


def test_bytes_are_those_of_the_tensors(step):
    calls, model = step
    d = model.dims
    first = {}
    for name, a in calls:
        first.setdefault(name, a)
    a = first["layernorm_fwd"]
    row = d["R"] * d["C"] * 4
    assert ops.moved_bytes("layernorm_fwd", a, False) == 2 * row + 2 * d["R"] * 4 + 2 * d["C"] * 4
    a = first["adamw"]
    n = a["w"].numel() * 4
    assert ops.moved_bytes("adamw", a, False) == 2 * 3 * n + n + sum(
        a[k].numel() * 4 for k in ("stats", "hyper", "rng")
    )


def test_the_table_of_sizes_has_ratios_in_our_favour_above_one():
    ours = dict(ms=100.0, gib=16.0, first_step=3.0)
    rows = [dict(size="d12", batch=64, recompute="gelu", ours=ours, torch=dict(ms=120.0, gib=25.6, first_step=20.0))]
    text = bench.table(rows, 989.4e12)
    assert "655,360" in text and "1.200x" in text and "0.62x" in text  # 64 * 1024 tokens in 0.1 s
    assert "1.200x" not in bench.table([rows[0] | dict(torch=None)], None)
