"""fp8 operands: rounding bit by bit, maxima and scales, and products against float64 of
the dequantised operands.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpt2_triton import kernels as K
from gpt2_triton.kernels import classifier, e4m3, hopper, tuning
from gpt2_triton.kernels.attention import attention_bwd_scratch
from gpt2_triton.kernels.classifier import classifier_fwd_scratch
from gpt2_triton.kernels.e4m3 import AMAX_CELLS, to_e4m3, to_e5m2
from gpt2_triton.kernels.fp8 import Fp8
from gpt2_triton.kernels.layernorm import layernorm_bwd_scratch
from gpt2_triton.kernels.matmul import matmul_dw_scratch
from gpt2_triton.kernels.tuning import is_hopper
from gpt2_triton.operands import Branch, Linear, Norm, Targets
from tests.conftest import DEVICE
from tests.support import reference
from tests.support.fp8 import (
    E4M3,
    E5M2,
    amax_of,
    bits,
    dequantised,
    in_pairs,
    operand,
    rounded,
)
from tests.support.helpers import error, exact, poisoned, scratch_of
from tests.support.launchers import mapped

BF16 = torch.bfloat16
R, C = 96, 80


@triton.jit
def _round_kernel(out_ptr, x_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, to_e5m2(x) if out_ptr.dtype.element_ty == tl.float8e5 else to_e4m3(x))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_equals_torch_in_every_bit(monkeypatch, dtype):
    """Random numbers of all binades, every number of 8 bits and its neighbours,
    midpoints, ends, NaN and infinity.
    """
    # tests' interpreter's
    monkeypatch.setattr(e4m3, "_rounded", getattr(e4m3._rounded, "replaced", e4m3._rounded))
    generator = np.random.default_rng(0)
    random = generator.standard_normal(40_000) * np.exp2(generator.integers(-22, 20, 40_000))
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(side)) for side in (-1e9, 1e9)]
    ends = [
        0.0,
        -0.0,
        448.0,
        464.0,
        480.0,
        57344.0,
        61440.0,
        65536.0,
        1e9,
        -1e9,
        1e-30,
        -1e-30,
        math.inf,
        -math.inf,
    ]
    ends = torch.tensor([*ends, math.nan, -math.nan])
    x = torch.cat([torch.from_numpy(random).float(), codes, middle, *near, ends]).to(DEVICE)
    x = torch.cat([x, x.new_zeros(65536 - len(x))])
    out = torch.empty(len(x), dtype=dtype, device=DEVICE)
    _round_kernel[(64,)](out, x, len(x) // 64)
    want = rounded(x, dtype)
    wrong = (bits(out) != bits(want)) & ~(out.float().isnan() & want.float().isnan())
    assert not wrong.any(), x[wrong][:5]


# ---- scales ----


def rolled(amax, history=None, applied=1.0):
    """Return scale and history after one roll of maxima [A]; the scales before are 3."""
    A = len(amax)
    cells = torch.zeros(A, AMAX_CELLS, device=DEVICE)
    cells[:, 5] = torch.tensor(amax)
    cells[:, 7] = torch.tensor(amax) / 2
    cells = cells.view(torch.int32)
    history = torch.zeros(A, 16, device=DEVICE) if history is None else history.clone()
    scale, step_out = (
        torch.full((A,), 3.0, device=DEVICE),
        torch.tensor([2.0, 1.0, 1.0, applied], device=DEVICE),
    )
    expected = [t.clone() for t in (scale, history, cells)]
    reference.roll_scales(*expected, step_out)
    K.roll_scales(scale, history, cells, step_out)
    assert all(map(torch.equal, (scale, history, cells), expected)) and not cells.any()
    return scale, history


@pytest.mark.parametrize(
    "value, bad", [(3.4e38, False), (float("inf"), True), (float("nan"), True)]
)
def test_an_amax_that_is_not_finite_makes_the_norm_nan(value, bad):
    """The last cell of the last of 40 tensors is set: those are more cells than a block has."""
    cells = torch.ones(40, AMAX_CELLS, device=DEVICE)
    cells[-1, -1] = value
    for check in (K.check_amax, reference.check_amax):
        squares = torch.tensor([2.0], device=DEVICE)
        check(squares, cells.view(torch.int32))
        assert squares.isnan().item() if bad else squares.item() == 2.0


def test_scales_are_the_largest_powers_of_two_with_margin():
    amax = [1.0, 1.75, 1.7500001, 448.0, 3e-5, 1e30, 224.0]
    scale, history = rolled(amax)
    assert history[:, 0].tolist() == torch.tensor(amax).tolist() and not history[:, 1:].any()
    for s, a in zip(scale.double().tolist(), torch.tensor(amax).double().tolist(), strict=True):
        assert np.log2(s) == round(np.log2(s)) and 2 * a * s <= 448 < 4 * a * s, a
    assert rolled([1e-38])[0].item() == 2.0**100  # fp32 ends at 2^127


def test_the_window_is_sixteen_steps():
    history = torch.zeros(1, 16, device=DEVICE)
    history[0, 14] = 100.0
    _, history = rolled([1.0], history)
    scale, history = rolled([2.0], history)
    assert history[0].tolist() == [2.0, 1.0] + [0.0] * 14 and scale.item() == 64.0


@pytest.mark.parametrize(
    "amax, applied", [([0.0], 1.0), ([1.0], 0.0), ([float("nan")], 1.0), ([float("inf")], 1.0)]
)
def test_what_is_not_recorded_changes_no_scale(amax, applied):
    before = torch.arange(16.0, device=DEVICE).view(1, 16)
    scale, history = rolled(amax, before, applied)
    if amax == [0.0]:
        assert history[0, 0] == 0 and scale.item() == 16.0  # 14 is the largest of those that stay
    else:
        assert torch.equal(history, before) and scale.item() == 3.0
    assert rolled([0.0])[0].item() == 3.0


# ---- the tensors that kernels write ----


@pytest.mark.parametrize("shapes", [((64, 80), (208, 48), (400, 272), (16, 16)), ((72, 40),) * 4])
def test_weights_are_cast_and_transposed(shapes, rng):
    weights = [rng(*shape, dtype=BF16) * 0.02 for shape in shapes]
    operands = [dataclasses.replace(operand(*w.shape, scale=64.0), value=w) for w in weights]
    expected = [mapped(w8, torch.clone) for w8 in operands]
    K.cast_weights(*operands)
    reference.cast_weights(*expected)
    for w8, want in zip(operands, expected, strict=True):
        assert torch.equal(bits(w8.rows), bits(want.rows))
        assert torch.equal(bits(w8.columns), bits(want.columns))
        assert amax_of(w8) == amax_of(want) > 0


def test_saturated_and_flushed_elements_are_counted(rng):
    x = operand(R, C, 300.0, value=torch.cat([rng(R - 1, C), torch.zeros(1, C, device=DEVICE)]))
    parts = poisoned(2, K.stats_parts())
    for acc in (False, True):
        expected = parts.clone()
        K.fp8_stats(parts, x, acc)
        reference.fp8_stats(expected, x, acc)
        want = expected.sum(1).tolist()
        assert parts.sum(1).tolist() == want and min(want) >= C * (1 + acc)


def close_to_rounded(got: Fp8, want: torch.Tensor) -> None:
    """Compare with the rounding of float64 numbers: a small share is rounded
    the other way, one step off.

    On a GPU, tensor cores add fp8 products to 14 bits, and GELU's arithmetic is in fp16.
    """
    nearest = rounded((want * got.scale).float())
    differ = bits(got.rows) != bits(nearest)
    assert differ.float().mean() < (0.08 if DEVICE == "cuda" else 2e-3)
    assert error(got.rows, nearest) < (1e-2 if DEVICE == "cuda" else 2e-3)
    assert abs(amax_of(got) / want.abs().max().item() - 1) < (1e-3 if DEVICE == "cuda" else 1e-5)


def test_layernorm_writes_fp8_alone_and_beside_bf16(rng):
    x, w, b = rng(R, C, dtype=BF16), 0.3 * rng(C, dtype=BF16), rng(C, dtype=BF16)
    x[:, 0], w[0], b[0] = -9, 1, 9  # the norm of a row past the end, b, would be the largest
    results = []
    for value in (None, poisoned(R, C, dtype=BF16)):
        out, mean, rstd = (
            dataclasses.replace(operand(R, C, 16.0), value=value),
            poisoned(R),
            poisoned(R),
        )
        K.layernorm_fwd(out, Norm(w, b, mean, rstd), x)
        results.append((bits(out.rows), out.amax, mean, rstd))
    plain = poisoned(R, C, dtype=BF16)
    norm = Norm(w, b, mean, rstd)
    K.layernorm_fwd(plain, norm, x)
    close_to_rounded(out, exact("layernorm_fwd", [plain, norm], x)[0])
    assert torch.equal(value, plain)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_layernorm_bwd_writes_gradient_and_norm_in_fp8(rng):
    x, w, b, dout, dx = (rng(*s, dtype=BF16) for s in ((R, C), (C,), (C,), (R, C), (R, C)))
    x += 50  # past the end of a row x - mean would be the largest
    mean, rstd = poisoned(R), poisoned(R)
    forward = operand(R, C, 16.0)
    K.layernorm_fwd(forward, Norm(w, b, mean, rstd), x)
    results = []
    for quantised in (False, True):
        value = dx.clone()
        out = dataclasses.replace(operand(R, C, 8.0), value=value) if quantised else value
        ln = operand(R, C, 16.0) if quantised else poisoned(R, C, dtype=BF16)
        sums = [poisoned(C) for _ in range(3)]
        norm, branch = Norm(w, b, mean, rstd, *sums[:2]), Branch(sums[2])
        scratch = poisoned(layernorm_bwd_scratch(R, C, "bf16"))
        K.layernorm_bwd(out, norm, branch, ln, scratch, dout, x, out, False)
        results.append((value, *sums))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert torch.equal(bits(ln.rows), bits(forward.rows)) and not ln.amax.any()
    assert error(dequantised(out), value) < 0.03  # e4m3 itself: 0.027
    # the interpreter truncates to bf16
    assert abs(amax_of(out) / value.abs().max().item() - 1) < 2**-7


@pytest.mark.parametrize("T,HS", [(48, 64), (48, 80), (128, 64)])
def test_attention_writes_fp8(T, HS, rng):
    """Blocks reach past a sequence of 48, and 80 of a head, but not into the next one's
    columns; 128 are Hopper's.
    """
    B, NH = 2, 2
    width = NH * HS
    qkv, dout = rng(B * T, 3 * width, dtype=BF16), rng(B * T, width, dtype=BF16)
    lse, delta = poisoned(B, NH, T), poisoned(B, NH, T)
    scratch = poisoned(attention_bwd_scratch(B, T, width, HS, "bf16"))
    plain, dqkv = poisoned(B * T, width, dtype=BF16), poisoned(B * T, 3 * width, dtype=BF16)
    K.attention_fwd(plain, lse, qkv)
    K.attention_bwd(dqkv, poisoned(3 * width), delta, scratch, dout, qkv, plain, lse, False)
    out = dataclasses.replace(operand(B * T, width, 32.0), value=poisoned(B * T, width, dtype=BF16))
    dqkv8, dbias = operand(B * T, 3 * width, 64.0), poisoned(3 * width)
    K.attention_fwd(out, lse, qkv)
    K.attention_bwd(dqkv8, dbias, delta, scratch, dout, qkv, out, lse, False)
    assert torch.equal(out.value, plain)
    for got, want in ((out, plain), (dqkv8, dqkv)):
        assert error(dequantised(got), want) < 0.03  # e4m3's own 0.027
        # the interpreter truncates to bf16
        assert abs(amax_of(got) / want.abs().max().item() - 1) < 2**-7
        assert torch.equal(bits(got.columns), in_pairs(got.rows))


def test_the_amax_of_attention_leaves_out_rows_past_the_sequence():
    """Such a row is the mean of all values; the queries of the sequence choose the first, 0."""
    T, HS = 48, 64
    qkv = torch.zeros(T, 3, HS, dtype=BF16, device=DEVICE)
    qkv[:, 0] = qkv[0, 1] = qkv[1:, 2] = 1
    out = dataclasses.replace(operand(T, HS), value=poisoned(T, HS, dtype=BF16))
    K.attention_fwd(out, poisoned(1, 1, T), qkv.view(T, 3 * HS))
    assert 0 < amax_of(out) == out.value.max().item()


# ---- products ----


def product_operands(rng, M, N, depth):
    a = operand(M, depth, 16.0, value=rng(M, depth))
    w = operand(N, depth, 64.0)
    w.rows.copy_(rounded(rng(N, depth)))
    w.columns.copy_(w.rows.T)
    return a, w


@pytest.mark.parametrize("residual", [False, True])
def test_products_equal_float64(residual, rng):
    a, w = product_operands(rng, R, 112, C)
    b, res, out = rng(112, dtype=BF16), rng(R, 112, dtype=BF16), poisoned(R, 112, dtype=BF16)
    want = dequantised(a) @ dequantised(w).T + b.double()
    if residual:
        K.matmul_add(out, res, a, Linear(w, b))
        want += res.double()
    else:
        K.matmul(out, a, Linear(w, b))
    assert error(out, want) < 4e-3  # the rounding to bf16, which the interpreter truncates
    dinp, (dout, _) = poisoned(R, C, dtype=BF16), product_operands(rng, R, 16, 112)
    K.matmul_dx(dinp, dout, Linear(w))
    assert error(dinp, dequantised(dout) @ dequantised(w)) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(
    not is_hopper(), reason="the portable kernels sum in the tensor cores' own precision"
)
@pytest.mark.parametrize("depth", [1600, 6400])
def test_long_sums_of_one_sign_are_not_biased(depth, rng):
    """A tensor core's sum of 1,600 terms of one sign is 2.3% too small, of 6,400
    10%; in parts of 128, 0.06%.
    """
    a, w = product_operands(rng, 256, 320, depth)
    for x in (a, w):
        x.rows.copy_(rounded(x.rows.float().abs()))
    b, res = rng(320, dtype=BF16), rng(256, 320, dtype=BF16)
    want = dequantised(a) @ dequantised(w).T
    plain, added = (poisoned(256, 320, dtype=BF16) for _ in range(2))
    K.matmul(plain, a, Linear(w))
    K.matmul_add(added, res, a, Linear(w, b))
    for out in (plain, added.double() - b.double() - res.double()):
        assert abs((out.double() * want).sum() / (want * want).sum() - 1) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True])
def test_long_sums_of_dw_of_one_sign_are_not_biased(portable, monkeypatch, rng):
    """Tensor cores alone would sum 16,384 terms; partial sums make the error of 128 or 256."""
    if portable:
        monkeypatch.setattr(hopper, "takes", lambda *_: None)
    rows, N = 1 << 14, 256
    dout, inp = (operand(rows, N, 16.0, value=rng(rows, N).abs()) for _ in range(2))
    dw, scratch = poisoned(N, N), scratch_of(matmul_dw_scratch(rows, "fp8", (N, N)))
    K.matmul_dw(dw, scratch, dout, inp, False)
    want = dequantised(dout).T @ dequantised(inp)
    assert abs((dw.double() * want).sum() / (want * want).sum() - 1) < 2e-3


# whole tiles: six; 153, so that some of 132 programs have a second one
GPU_SIZES = [(384, 512), (2176, 2304)]


@pytest.mark.parametrize(
    "R, N", [(96, 112), *(pytest.param(*size, marks=pytest.mark.gpu) for size in GPU_SIZES)]
)
def test_gelu_and_its_derivative_as_a_byte(R, N, rng):
    """In the portable kernels, and on Hopper, where M and N fill whole tiles,
    in those of kernels/hopper.
    """
    a, w = product_operands(rng, R, N, C)
    b, slope = rng(N, dtype=BF16), torch.zeros(R, N, dtype=torch.uint8, device=DEVICE)
    out = operand(R, N, 16.0)
    K.matmul_act(out, slope, a, Linear(w, b), "gelu")
    pre = dequantised(a) @ dequantised(w).T + b.double()
    close_to_rounded(out, reference.ACTIVATIONS["gelu"](pre))
    assert torch.equal(bits(out.columns), in_pairs(out.rows))

    dout, w2 = product_operands(rng, R, 16, 64)[0], product_operands(rng, 16, 64, N)[1]
    dpre, dbias, scratch = operand(R, N, 4.0), poisoned(N), poisoned(R * N)
    K.matmul_dx_dact(dpre, dbias, None, scratch, dout, Linear(w2), slope, False, "gelu")
    product = dequantised(dout) @ dequantised(w2)
    want = product * reference.dactivation(pre, "gelu")
    assert (error(dequantised(dpre), want)) < 0.03
    assert torch.equal(bits(dpre.columns), in_pairs(dpre.rows))
    assert abs(amax_of(dpre) / want.abs().max().item() - 1) < 0.01
    # half a step of the byte in each of R terms, which are independent
    assert error(dbias, want.sum(0)) < 0.005
    once = dbias.clone()
    K.matmul_dx_dact(dpre, dbias, None, scratch, dout, Linear(w2), slope, True, "gelu")
    assert torch.equal(dbias, 2 * once)


def test_the_amax_of_gelu_leaves_out_rows_past_the_end():
    """Such a row is gelu of the bias, which the others' products nearly cancel."""
    a, w = (operand(n, C, 64.0, value=torch.full((n, C), x)) for n, x in ((R, 1.0), (112, -1.0)))
    b = torch.full((112,), C + 1.5, dtype=BF16, device=DEVICE)
    out, slope = operand(R, 112, 64.0), poisoned(R, 112).to(torch.uint8)
    K.matmul_act(out, slope, a, Linear(w, b), "gelu")
    want = reference.ACTIVATIONS["gelu"](torch.tensor(1.5, dtype=torch.float64))
    assert amax_of(out) == pytest.approx(want.item(), rel=0.01)


def test_the_amax_of_gelu_s_derivative_leaves_out_columns_past_the_end(monkeypatch, rng):
    """Without TMA such a column is the last one again, but its slope is not 0."""
    monkeypatch.setattr(tuning, "has_tma", lambda: False)
    dout, w = product_operands(rng, R, 16, 64)[0], product_operands(rng, 16, 64, C)[1]
    dpre, scratch = operand(R, C), poisoned(R * C)
    slope = torch.full((R, C), int(e4m3.ZERO.value), dtype=torch.uint8, device=DEVICE)
    K.matmul_dx_dact(dpre, poisoned(C), None, scratch, dout, Linear(w), slope, False, "gelu")
    assert amax_of(dpre) == 0


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's, in tanh
@pytest.mark.parametrize("far", [5e3, 1e6])
def test_derivative_of_gelu_far_from_0_is_1_or_0(far, rng):
    """Inputs are so large that 15 times their value, or they themselves, are beyond fp16."""
    M, N = 128, 256
    a, w = product_operands(rng, M, N, C)
    b, slope = (
        torch.tensor([far, -far], dtype=BF16, device=DEVICE).repeat(N // 2),
        poisoned(M, N).to(torch.uint8),
    )
    K.matmul_act(operand(M, N, 1 / 16), slope, a, Linear(w, b), "gelu")
    dout, w2 = product_operands(rng, M, 16, 64)[0], product_operands(rng, 16, 64, N)[1]
    dpre = operand(M, N, 4.0)
    K.matmul_dx_dact(
        dpre, poisoned(N), None, poisoned(M * N), dout, Linear(w2), slope, False, "gelu"
    )
    product = dequantised(dout) @ dequantised(w2)
    got = dequantised(dpre)
    # e4m3's own 0.027
    assert (got[:, 1::2] == 0).all() and error(got[:, ::2], product[:, ::2]) < 0.03


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered", "ignore:overflow encountered in exp"
)
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_bias_is_seen(value, rng):
    """Output or amax is not finite, so the step is skipped; Hopper's GELU cuts inputs
    beyond fp16, but not infinity.
    """
    a, w = product_operands(rng, 128, 256, C)
    b, out = torch.zeros(256, dtype=BF16, device=DEVICE), operand(128, 256, 16.0)
    b[[3, 200]] = value  # in both halves of Hopper's tile
    K.matmul_act(out, poisoned(128, 256).to(torch.uint8), a, Linear(w, b), "gelu")
    assert out.rows.float()[:, [3, 200]].isnan().all() or not math.isfinite(amax_of(out))


@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradients_equal_float64(transposed, rng):
    dout, inp = (operand(R, n, s, transposed, value=rng(R, n)) for n, s in ((48, 8.0), (C, 32.0)))
    dw = poisoned(48, C)
    scratch = scratch_of(matmul_dw_scratch(R, "fp8", (48, C)))
    want = dequantised(dout).T @ dequantised(inp)
    for acc in (False, True):
        K.matmul_dw(dw, scratch, dout, inp, acc)
        # 14 bits within 128 terms
        assert error(dw, want * (1 + acc)) < (2e-4 if DEVICE == "cuda" else 1e-6)
    assert torch.equal(bits(dout.columns), in_pairs(dout.rows))


# ---- the head ----

V, VP = 300, 384


def head_operands(rng):
    """Return lnf, wte and targets, every fifth of them ignored; wte has a second
    row equal to each target's.
    """
    value = rng(R, C, dtype=BF16)
    lnf = dataclasses.replace(operand(R, C, 32.0, False, value=value.float()), value=value)
    wte = operand(VP, C, 256.0)
    wte.rows.copy_(rounded(4 * rng(VP, C) * C**-0.5 * 256))
    wte.rows[V // 2 : V] = wte.rows[: V // 2]
    wte.columns.copy_(wte.rows.T)
    targets = torch.randint(V // 2, (R,), generator=rng.generator, dtype=torch.int32).to(DEVICE)
    targets[0], targets[4::5] = 0, -1
    return lnf, wte, targets


def exponentials(lnf, wte, ids, cap, n=R):
    """Return p, its row sums and the targets of the first n rows as the launchers write
    them; p is full of NaN before.
    """
    targets = Targets(ids, poisoned(R), cap)
    rowsum = poisoned(classifier_fwd_scratch(R, VP, "fp8"))
    p = dataclasses.replace(operand(R, VP, dtype=E5M2), scale=poisoned(1), amax=None)[:n]
    K.classifier_target(targets, lnf, wte)
    targets = targets.rows(slice(n))
    K.classifier_fwd(p, rowsum, lnf[:n], wte, targets, V)
    return p, rowsum, targets


def units(peek):
    return torch.exp2(torch.floor(torch.log2(1 + peek)))


@pytest.mark.parametrize("cap", [0.0, 8.0])
def test_logits_equal_float64_and_the_target_s_to_the_last_bit(rng, monkeypatch, cap):
    """p is exactly the target's where wte's row equals the target's: zt is
    summed as the product sums.
    """
    monkeypatch.setattr(classifier, "PEEK", 256)
    lnf, wte, ids = head_operands(rng)
    p, rowsum, targets = exponentials(lnf, wte, ids, cap)
    operands = dequantised(lnf), dequantised(wte)
    [exact_targets] = exact("classifier_target", [targets], *operands)
    limit = 1e-3 if DEVICE == "cuda" else 1e-6  # 14 bits
    assert error(targets.logits, exact_targets.logits) < limit
    outputs = poisoned(R, VP), poisoned(R)
    want, sums = exact("classifier_fwd", outputs, *operands, targets, V)
    _, peek_sums = exact("classifier_fwd", outputs, *operands, targets, 256)
    peek = rowsum[2 * R : 3 * R].double()
    assert error(peek, peek_sums) < (1e-3 if DEVICE == "cuda" else 1e-5)
    want /= units(peek)[:, None]
    differ = bits(p.rows) != bits(rounded((want * 128).float(), E5M2))
    assert p.scale.item() == 128 and differ.float().mean() < (0.01 if DEVICE == "cuda" else 1e-4)
    assert torch.equal(bits(p.columns), in_pairs(p.rows))
    assert error(rowsum[:R], sums / units(peek)) < (1e-3 if DEVICE == "cuda" else 1e-5)
    rows = (ids >= 0).nonzero()[:, 0]
    if not cap:
        assert error(rowsum[R : 2 * R], dequantised(p).sum(1)) < 1e-6
        twin = dequantised(p)[rows, ids[rows].long() + V // 2] * units(peek)[rows]
        assert (twin[units(peek)[rows] < 2**20] == 1).all()  # above 2^23 it becomes 0
    assert not p.rows.float()[rows, ids[rows].long()].any() and not p.rows.float()[:, V:].any()


@pytest.mark.parametrize("n,cap", [(R, 0.0), (48, 0.0), (R, 8.0)])
def test_the_head_s_gradients_equal_float64(n, cap, rng):
    """Of all rows, and of a chunk that is shorter than its buffers."""
    lnf, wte, ids = head_operands(rng)
    p, rowsum, targets = exponentials(lnf, wte, ids, cap, n)
    lns = Fp8(lnf.rows[:0], operand(R, C, dtype=E5M2).columns, poisoned(1), None, True)[:n]
    step_in = torch.tensor([float("nan")] * 3 + [1 / 3000] + [float("nan")] * 4, device=DEVICE)
    plain, results = poisoned(n, C, dtype=BF16), []
    whole = rowsum.clone()
    whole[:n] *= units(rowsum[2 * n : 3 * n])
    for form, sums in ((plain, whole), (lns, rowsum)):
        losses, rs, ks = (poisoned(n) for _ in range(3))
        K.classifier_loss(losses, rs, ks, form, sums, lnf[:n], targets, step_in, False)
        results.append(losses)
    operands, outputs = (dequantised(lnf)[:n], dequantised(wte)), (poisoned(n, VP), poisoned(n))
    exact_p, sums = exact("classifier_fwd", outputs, *operands, targets, V)
    slope = reference.slope(targets.logits.double() / math.log2(math.e), cap)
    # the sum of a row of dlogits: 0 without a cap
    want = (exact_p.sum(1) - sums * slope) / units(rowsum[2 * n : 3 * n])
    wrong = ks.double() + rs.double() * (dequantised(p).sum(1) - want)
    limit = (1e-3 if DEVICE == "cuda" else 1e-5) if cap else 1e-6
    assert (wrong.abs() <= limit * ks.abs()).all() and torch.equal(*results)
    assert lns.scale.item() == pytest.approx(128 * 32 * 3000, rel=1e-6)
    stored = rounded(lnf.value[:n].float() * (rs * lns.scale)[:, None], E5M2)
    assert torch.equal(bits(lns.columns), in_pairs(stored))
    assert (
        error(stored.double() / lns.scale.double(), rs.double()[:, None] * lnf.value[:n].double())
        < 0.06
    )

    dln = poisoned(n, C, dtype=BF16)
    K.classifier_dx(dln, p, wte, rs, ks, targets.ids)
    rows, valid = dequantised(wte)[ids[:n].clamp(min=0).long()], (ids[:n] >= 0)[:, None]
    want = (
        rs.double()[:, None] * (dequantised(p) @ dequantised(wte))
        + ks.double()[:, None] * rows * valid
    )
    assert error(dln, want) < 4e-3  # the rounding to bf16, which the interpreter truncates
    dw, scratch = poisoned(VP, C), scratch_of(matmul_dw_scratch(n, "fp8", (VP, C)))
    want = dequantised(p).T @ (stored.double() / lns.scale.double())
    for acc in (False, True):
        K.matmul_dw(dw, scratch, p, lns, acc)
        # 14 bits within 256 terms
        assert error(dw, want * (1 + acc)) < (4e-4 if DEVICE == "cuda" else 1e-6)
