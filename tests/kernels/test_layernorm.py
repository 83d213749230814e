"""LayerNorm against float64, at ragged shapes and, on a GPU, at GPT-2's."""

import functools

import pytest
import torch

from gpt2_triton.kernels import layernorm
from gpt2_triton.kernels.contract import LAUNCHERS
from gpt2_triton.kernels.layernorm import layernorm_bwd, layernorm_bwd_scratch, layernorm_fwd
from gpt2_triton.kernels.tuning import PLANNED_SMS, dtype_name
from gpt2_triton.operands import Branch, Dropout, Norm
from tests.conftest import DEVICE
from tests.support import helpers
from tests.support.helpers import (
    NAMES,
    Guarded,
    accumulate,
    dtypes,
    error,
    exact,
    poisoned,
    require_same_bits,
)

# R, C: one row; ragged; GPT-2's widths, below and above 1024; three blocks of rows for two
# programs (the interpreter's)
SHAPES = [(1, 48), (7, 48), (33, 48), (1, 768), (7, 768), (33, 768), (33, 1600), (2100, 48)]
SUMS = 2e-6  # fp32 sums over rows; with few rows the error of xhat itself, a few ulp
shapes = pytest.mark.parametrize("R,C", SHAPES, ids=str)


# fp32: a few operations of an ulp each.  bf16: one rounding
tolerance = functools.partial(helpers.tolerance, fp32=1e-6)


def draw(rng, R, C, dtype):
    """Return x whose rows have different means and spreads, w around 1, and b."""
    x = rng(R, C) * rng(R, 1).mul(0.3).exp() + rng(R, 1)
    return x.to(dtype), (1 + 0.3 * rng(C)).to(dtype), rng(C, dtype=dtype)


def forward(x, w, b):
    out, mean, rstd = poisoned(*x.shape, dtype=x.dtype), poisoned(len(x)), poisoned(len(x))
    layernorm_fwd(out, Norm(w, b, mean, rstd), x)
    return out, mean, rstd


def exact_forward(x, w, b):
    norm = Norm(w, b, poisoned(len(x)), poisoned(len(x)))
    out, written = exact("layernorm_fwd", [poisoned(*x.shape), norm], x)
    return out, written.mean, written.rstd


def scratch(R, C, dtype):
    return poisoned(layernorm_bwd_scratch(R, C, NAMES[dtype]))


def check_backward(rng, R, C, dtype, acc, more, with_dbias=True, with_ln=True, p=0.0):
    x, w, b = draw(rng, R, C, dtype)
    dout, (mean, rstd) = rng(R, C, dtype=dtype), (t.float() for t in exact_forward(x, w, b)[1:])
    dx = rng(R, C, dtype=dtype) if more == "dx" else poisoned(R, C, dtype=dtype)
    added = rng(R, C, dtype=dtype) if more == "another" else dx if more else None
    dw, db, dbias = (rng(C) if acc else poisoned(C) for _ in range(3))
    dbranch, ln = (poisoned(R, C, dtype=dtype) if wanted else None for wanted in (p, with_ln))
    key = torch.tensor([3, 5, 7, 2 * R], dtype=torch.int32, device=DEVICE)
    dropout = Dropout(key, 4, p) if p else None
    branch = Branch(dbias if with_dbias else None, dbranch, dropout)
    outputs = [dx, Norm(w, b, mean, rstd, dw, db), branch, ln]
    want = exact("layernorm_bwd", outputs, None, dout, x, added, acc)
    layernorm_bwd(*outputs, scratch(R, C, dtype), dout, x, added, acc)
    written = LAUNCHERS["layernorm_bwd"].contract
    want = written.outputs([*want, None])
    one = tolerance(dtype)  # sums are of unrounded values in both dtypes
    sums = dict.fromkeys(("norm.dw", "norm.db", "branch.db"), SUMS)
    limits = {"dx": one, "branch.dout": one, "ln": one} | sums
    for name, got in written.outputs([*outputs, None]).items():
        assert error(got, want[name]) < limits[name], name


@dtypes
@shapes
def test_layernorm_fwd_matches_float64(rng, R, C, dtype):
    x, w, b = draw(rng, R, C, dtype)
    for got, want, limit in zip(
        forward(x, w, b), exact_forward(x, w, b), (tolerance(dtype), 1e-6, 1e-6), strict=True
    ):
        assert error(got, want) < limit


def test_layernorm_fwd_is_exact_for_a_large_mean(rng):
    """Two passes: E[x^2] - mean^2 would subtract a million from a million
    and one, and be off by 0.06.
    """
    x, w, b = 1000 + rng(33, 768), rng(768), rng(768)
    _, mean, rstd = forward(x, w, b)
    assert error(mean, exact_forward(x, w, b)[1]) < 1e-6
    assert error(rstd, exact_forward(x, w, b)[2]) < 1e-6


@accumulate
@dtypes
@pytest.mark.parametrize("R,C", [*SHAPES, (1100, 1040)])
def test_layernorm_bwd_matches_float64(rng, R, C, dtype, acc):
    check_backward(rng, R, C, dtype, acc, more="another")


@dtypes
@pytest.mark.parametrize("changes", [dict(more=""), dict(with_dbias=False, with_ln=False)], ids=str)
def test_layernorm_bwd_overwrites_dx_and_leaves_out_dbias_and_ln(rng, dtype, changes):
    check_backward(rng, 33, 48, dtype, **dict(acc="more" in changes, more="dx") | changes)


@dtypes
# 1e-6: rounded to 0
@pytest.mark.parametrize("R,C,p", [(33, 48, 0.3), (7, 1600, 0.3), (33, 48, 1e-6)])
def test_layernorm_bwd_masks_the_gradient_of_the_branch_and_of_its_bias(rng, R, C, p, dtype):
    check_backward(rng, R, C, dtype, acc=False, more="dx", p=p)


def run_all(R, C, dtype, outputs):
    """Run both launchers once on fixed inputs; `outputs(*shape, dtype)`
    allocates outputs and scratch.
    """
    generator = torch.Generator().manual_seed(1)
    sizes = (R, C), (R, C), (C,), (C,)
    x, dout, w, b = (torch.randn(*size, generator=generator).to(DEVICE, dtype) for size in sizes)
    out, mean, rstd = outputs(R, C, dtype=dtype), outputs(R), outputs(R)
    dx, ln = outputs(R, C, dtype=dtype), outputs(R, C, dtype=dtype)
    dw, db, dbias = (outputs(C) for _ in range(3))
    norm = Norm(w, b, mean, rstd, dw, db)
    layernorm_fwd(out, norm, x)
    slots = outputs(layernorm_bwd_scratch(R, C, dtype_name(x)))
    layernorm_bwd(dx, norm, Branch(dbias), ln, slots, dout, x, None, False)
    return out, ln, mean, rstd, dx, dw, db, dbias


@dtypes
@pytest.mark.parametrize("R,C", [(33, 48), (2100, 48), (33, 1600)])
def test_layernorm_gives_the_same_bits_recomputes_them_and_writes_only_its_outputs(R, C, dtype):
    require_same_bits(functools.partial(run_all, R, C, dtype), allocations=9)
    out, ln, *_ = run_all(R, C, dtype, poisoned)
    assert torch.equal(out, ln)


def test_layernorm_bwd_of_more_multiprocessors_than_planned_stays_in_its_scratch(monkeypatch):
    monkeypatch.setattr(layernorm, "num_sms", lambda: 2 * PLANNED_SMS)
    guarded = Guarded()
    run_all(2100, 48, torch.float32, guarded)
    assert guarded.intact() == 9


@pytest.mark.gpu
@pytest.mark.parametrize("R,C", [(8192, 768), (8192 + 3, 1600)], ids=["124M", "1558M-ragged"])
def test_layernorm_bwd_of_gpt2_on_gpu(rng, R, C):
    check_backward(rng, R, C, torch.bfloat16, acc=True, more="dx")
    first, second = (run_all(R, C, torch.bfloat16, poisoned) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[0], first[1])
