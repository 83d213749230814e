"""The output head and its loss: each launcher against float64, and the
whole recipe against autograd.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from gpt2_triton.data.packing import scatter_bounds, scatter_table
from gpt2_triton.kernels import classifier as cl
from gpt2_triton.kernels import hopper, tuning
from gpt2_triton.kernels.embedding import embedding_bwd, embedding_bwd_scratch
from gpt2_triton.kernels.matmul import matmul_dw, matmul_dw_scratch
from gpt2_triton.kernels.tuning import INTERPRET, is_hopper
from gpt2_triton.operands import Targets, TokenRows
from tests.conftest import DEVICE
from tests.support import helpers
from tests.support.helpers import (
    DTYPES,
    NAMES,
    accumulate,
    dtypes,
    error,
    exact,
    poisoned,
    require_same_bits,
    scratch_of,
)

# R, C, V: one row; ragged; two blocks of rows, columns and the sum (blocks of the interpreter)
SHAPES = [(1, 48, 300), (77, 48, 300), (1100, 528, 1100)]
GPT2 = [(8192, 768, 50257), (6144 + 40, 1600, 50257)]
BF16_ON_GPU = [pytest.param(*size, torch.bfloat16, marks=pytest.mark.gpu) for size in GPT2]


def cases(*sizes):
    """Return sizes in both dtypes, and GPT-2's on a GPU in bf16."""
    rows = [(*size, dtype) for size in sizes for dtype in DTYPES] + BF16_ON_GPU
    return pytest.mark.parametrize("R,C,V,dtype", rows, ids=str)


SCALE = 1 / 3000  # the loss scale
caps = pytest.mark.parametrize("cap", [0.0, 5.0])


# fp32: exponents of 10 are off by an ulp or two.  bf16: rounding moves a value by up to 2 EPS
tolerance = functools.partial(helpers.tolerance, fp32=2e-6, roundings=2)


def max_relative(got, want):
    return ((got - want) / want).abs().max()


def draw(rng, R, C, V, dtype):
    """Return lnf, wte with zeros in the padding, and targets, every fifth of them
    ignored; logits are of order one.
    """
    Vp = -(-V // 128) * 128
    lnf, wte = rng(R, C, dtype=dtype), rng(Vp, C).mul(C**-0.5).to(dtype)
    wte[V:] = 0
    targets = torch.randint(V, (R,), generator=rng.generator, dtype=torch.int32).to(DEVICE)
    targets[0], targets[4::5] = 0, -1
    return lnf, wte, targets


def scratch(R, Vp, dtype):
    return poisoned(cl.classifier_fwd_scratch(R, Vp, NAMES[dtype]))


def step_in():
    return torch.tensor([float("nan")] * 3 + [SCALE] + [float("nan")] * 4, device=DEVICE)


def predicted(lnf, wte, ids, cap=0.0):
    """Return targets with their logits."""
    targets = Targets(ids, poisoned(len(ids)), cap)
    cl.classifier_target(targets, lnf, wte)
    return targets


def run_losses(lnf, wte, targets, V, keep_p=True, cap=0.0):
    """Return losses and p, computed by the launchers alone."""
    R, Vp = len(targets), len(wte)
    p, rowsum, losses = (
        poisoned(R, Vp, dtype=lnf.dtype) if keep_p else None,
        scratch(R, Vp, lnf.dtype),
        poisoned(R),
    )
    targets = predicted(lnf, wte, targets, cap)
    cl.classifier_fwd(p, rowsum, lnf, wte, targets, V)
    cl.classifier_loss(losses, None, None, None, rowsum, lnf, targets, step_in(), False)
    return losses, p


def run_chunk(lnf, wte, targets, V, cap=0.0):
    """Return the outputs of all launchers for one chunk of rows: losses, p, rs, ks, lns, dln."""
    R, C = lnf.shape
    p, rowsum = poisoned(R, len(wte), dtype=lnf.dtype), scratch(R, len(wte), lnf.dtype)
    losses, rs, ks = (poisoned(R) for _ in range(3))
    lns, dln = (poisoned(R, C, dtype=lnf.dtype) for _ in range(2))
    targets = predicted(lnf, wte, targets, cap)
    cl.classifier_fwd(p, rowsum, lnf, wte, targets, V)
    cl.classifier_loss(losses, rs, ks, lns, rowsum, lnf, targets, step_in(), False)
    cl.classifier_dx(dln, p, wte, rs, ks, targets.ids)
    return losses, p, rs, ks, lns, dln


# ---- each launcher ----


@caps
@dtypes
@pytest.mark.parametrize("R,C,V", SHAPES)
def test_target_matches_float64(rng, R, C, V, dtype, cap):
    lnf, wte, targets = draw(rng, R, C, V, dtype)
    got = predicted(lnf, wte, targets, cap)
    [want] = exact("classifier_target", [got], lnf, wte)
    # products and sums are fp32, whatever the storage
    assert error(got.logits, want.logits) < 1e-6
    assert (got.logits[targets < 0] == 0).all()


@caps
@cases(*SHAPES)
def test_fwd_matches_float64(rng, R, C, V, dtype, cap):
    lnf, wte, ids = draw(rng, R, C, V, dtype)
    Vp = len(wte)
    targets = predicted(lnf, wte, ids, cap)
    p, rowsum = poisoned(R, Vp, dtype=dtype), scratch(R, Vp, dtype)
    cl.classifier_fwd(p, rowsum, lnf, wte, targets, V)
    want, want_rowsum = exact("classifier_fwd", [p, poisoned(R)], lnf, wte, targets, V)
    assert error(p, want) < tolerance(dtype)
    # summed before p is rounded; tensor cores drop bits of a logit's partial sums
    assert error(rowsum[:R], want_rowsum) < (2e-6 if INTERPRET else 1e-5)
    assert (p[:, V:] == 0).all()
    rows = (ids >= 0).nonzero()[:, 0]
    assert (p[rows, ids[rows].long()] == 0).all()


@caps
@accumulate
@dtypes
@pytest.mark.parametrize("R,C,V", SHAPES)
def test_stats_match_float64(rng, R, C, V, dtype, acc, cap):
    lnf, _, targets = draw(rng, R, C, V, dtype)
    s = rng(R).mul(6).exp()  # 1e-8 to 1e8
    losses, rs, ks, lns = (
        rng(R) if acc else poisoned(R),
        poisoned(R),
        poisoned(R),
        poisoned(R, C, dtype=dtype),
    )
    inputs = s, lnf, Targets(targets, rng(R), cap), step_in(), acc
    want = exact("classifier_loss", [losses, rs, ks, lns], *inputs)
    cl.classifier_loss(losses, rs, ks, lns, *inputs)
    for got, expected in zip((losses, rs, ks), want[:3], strict=True):
        assert error(got, expected) < 1e-6
    if not acc:
        valid = targets >= 0
        # of each loss separately, the tiny ones too
        assert max_relative(losses[valid], want[0][valid]) < 1e-6
    assert error(lns, want[3]) < tolerance(dtype)


@cases(*SHAPES)
def test_dx_matches_float64(rng, R, C, V, dtype):
    _, wte, targets = draw(rng, R, C, V, dtype)
    p, rs, ks, dln = (
        rng(R, len(wte)).exp().to(dtype),
        rng(R).exp(),
        rng(R).mul(10),
        poisoned(R, C, dtype=dtype),
    )
    ks[targets < 0] = 0
    [want] = exact("classifier_dx", [dln], p, wte, rs, ks, targets)
    cl.classifier_dx(dln, p, wte, rs, ks, targets)
    # a sum of V products in fp32 is good to 5e-6, one of 50304 on tensor cores to
    # 1e-5: far below bf16's rounding
    assert error(dln, want) < max(5e-6, tolerance(dtype))


# ---- the recipe ----


def head(lnf, wte, targets, V, chunk, cap):
    """Return losses, dlnf and dwte as in the schedule: chunk by chunk, then the
    target rows by embedding_bwd.
    """
    (R, C), Vp = lnf.shape, len(wte)
    parts = []
    dwte = poisoned(Vp, C)
    for first in range(0, R, chunk):
        rows = slice(first, first + chunk)
        losses, p, _, ks, lns, dln = run_chunk(lnf[rows], wte, targets[rows], V, cap)
        matmul_dw(
            dwte,
            scratch_of(matmul_dw_scratch(len(p), NAMES[p.dtype], (Vp, C))),
            p,
            lns,
            first > 0,
        )
        parts.append((losses, dln, ks))
    losses, dln, ks = (torch.cat(part) for part in zip(*parts, strict=True))
    ids = torch.randint(V, (R,), dtype=torch.int32)
    tables = [
        torch.from_numpy(t).to(DEVICE) for t in scatter_table(ids.numpy(), targets.cpu().numpy(), V)
    ]
    slots = scratch_of(embedding_bwd_scratch(scatter_bounds(R, V)[2], C))
    embedding_bwd(
        dwte, poisoned(R, C), slots, torch.zeros_like(lnf), lnf, ks, TokenRows(*tables, R), False
    )
    return losses, dln, dwte


def autograd_head(lnf, wte, targets, V, cap):
    """Return the same from float64 autograd of torch's cross entropy over V classes."""
    lnf, wte = lnf.double().requires_grad_(), wte.double().requires_grad_()
    logits = lnf @ wte[:V].T
    if cap:
        logits = cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, targets.long(), ignore_index=-1, reduction="none")
    (losses.sum() * SCALE).backward()
    return losses.detach(), lnf.grad, wte.grad


# one chunk, ragged ones
RECIPES = [(77, 48, 300, dtype, chunk) for dtype in DTYPES for chunk in (77, 30)]
RECIPES += [pytest.param(*size, torch.bfloat16, 3072, marks=pytest.mark.gpu) for size in GPT2]


@caps
@pytest.mark.parametrize("R,C,V,dtype,chunk", RECIPES, ids=str)
def test_loss_and_gradients_equal_those_of_cross_entropy(rng, R, C, V, dtype, chunk, cap):
    lnf, wte, targets = draw(rng, R, C, V, dtype)
    wte *= 3  # losses around 10
    losses, dln, dwte = head(lnf, wte, targets, V, chunk, cap)
    want_losses, want_dln, want_dwte = autograd_head(lnf, wte, targets, V, cap)
    assert error(losses, want_losses) < 1e-6  # logits and losses are fp32 in both dtypes
    assert (losses[targets < 0] == 0).all() and (dln[targets < 0] == 0).all()
    # bf16: p, dln and lns are each rounded once; dln and dwte contain two of these roundings
    assert error(dln, want_dln) < tolerance(dtype)
    assert error(dwte, want_dwte) < tolerance(dtype)
    assert (dwte[V:] == 0).all()


@cases((77, 48, 300))
def test_losses_are_the_same_bits_without_p(rng, R, C, V, dtype):
    lnf, wte, targets = draw(rng, R, C, V, dtype)
    kept, only = (run_losses(lnf, wte, targets, V, keep_p)[0] for keep_p in (True, False))
    assert torch.equal(kept, only)


# ---- range ----


def with_logits(*logits):
    """Return a row lnf and a wte in fp32 that have these logits; the target is token 0."""
    wte = torch.zeros(128, 16, device=DEVICE)
    wte[: len(logits), 0] = torch.tensor(logits)
    lnf = torch.zeros(1, 16, device=DEVICE)
    lnf[0, 0] = 1
    return lnf, wte, torch.zeros(1, dtype=torch.int32, device=DEVICE), len(logits)


@pytest.mark.parametrize("gap", [-70.0, -40.0, -15.0, -2.0, -0.7, 0.0, 3.0, 20.0, 70.0])
def test_losses_are_precise_from_1e_minus_30_to_70(gap):
    """The other token's logit is `gap` above the target's: loss = log(1 + exp(gap)),
    no cancellation where tiny.
    """
    losses, *_, ks, _, dln = run_chunk(*with_logits(-gap / 2, gap / 2))
    share = math.exp(gap) / (1 + math.exp(gap))
    # exp(gap) is as precise as the exponent gap / log(2) in fp32: at 100, half an ulp is 4e-6
    assert losses.item() == pytest.approx(math.log1p(math.exp(gap)), rel=5e-6, abs=0)
    assert ks.item() == pytest.approx(-SCALE * share, rel=5e-6, abs=0)
    assert dln[0, 0].item() == pytest.approx(SCALE * share * gap, rel=5e-6, abs=0)


def test_losses_above_75_are_clamped_and_their_gradient_is_not():
    losses, *_, dln = run_chunk(*with_logits(-100.0, 100.0))
    assert losses.item() == pytest.approx(108 * math.log(2), rel=1e-6)
    assert dln[0, 0].item() == pytest.approx(SCALE * 200, rel=1e-6)


@pytest.mark.filterwarnings("ignore:overflow")  # exp2 of the interpreter
def test_logits_far_above_a_cap_are_the_cap_and_have_no_gradient():
    losses, *_, ks, _, dln = run_chunk(*with_logits(-1e4, 1e4), cap=5.0)
    assert losses.item() == pytest.approx(math.log1p(math.exp(10)), rel=5e-6)
    assert ks.item() == 0 and not dln.any()


@caps
@dtypes
def test_nan_in_a_row_makes_its_loss_nan(rng, dtype, cap):
    """The clamp and the cap must not hide a broken run behind a loss of 75."""
    lnf, wte, targets = draw(rng, 77, 48, 300, dtype)
    lnf[3, 7] = float("nan")
    losses, _ = run_losses(lnf, wte, targets, 300, cap=cap)
    assert losses.isnan().nonzero().flatten().tolist() == [3]


# ---- order and bounds ----


@dtypes
def test_results_do_not_depend_on_the_number_of_programs_and_nothing_else_is_written(
    rng, monkeypatch, dtype
):
    inputs = draw(rng, 1100, 48, 1100, dtype)

    def run(outputs):
        monkeypatch.setitem(globals(), "poisoned", outputs)
        return run_chunk(*inputs, 1100)

    monkeypatch.setattr(tuning, "num_sms", lambda: 1)
    alone = run(poisoned)
    monkeypatch.setattr(tuning, "num_sms", lambda: 3)
    assert all(torch.equal(one, three) for one, three in zip(alone, run(poisoned), strict=True))
    require_same_bits(run, allocations=8)


def test_classifier_fwd_refuses_a_scratch_that_is_too_small(rng):
    lnf, wte, targets = draw(rng, 77, 48, 300, torch.float32)
    with pytest.raises(AssertionError, match="classifier_fwd: part has 0 elements, needs"):
        cl.classifier_fwd(None, poisoned(77), lnf, wte, Targets(targets, poisoned(77)), 300)


# ---- GPT-2's shapes ----


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
def test_dx_in_tiles_of_320_columns_gives_the_same_bits_on_gpu(rng, monkeypatch):
    R, C, V = GPT2[1]
    _, wte, targets = draw(rng, R, C, V, torch.bfloat16)
    p, rs, ks = rng(R, len(wte)).exp().to(torch.bfloat16), rng(R).exp(), rng(R).mul(10)
    results = []
    for faster in (True, False):
        monkeypatch.setattr(hopper, "wide_is_faster", lambda R, C, faster=faster: faster)
        results.append(poisoned(R, C, dtype=torch.bfloat16))
        cl.classifier_dx(results[-1], p, wte, rs, ks, targets)
    assert torch.equal(*results)
