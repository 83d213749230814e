"""Compares the fp8 launchers with float64 results from the dequantised operands:
`python -m benchmarks verify`.

PyTorch has no such operations, so each output has a limit, derived from its rounding and from the
tensor cores' sums.  Some operands are also stored transposed; both copies must be equal bit by bit.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import gpt2_triton.kernels as K
from benchmarks.accuracy.comparison import (
    BF16,
    DEVICE,
    F32,
    GPU,
    STORAGE,
    Comparison,
    Sizes,
    empty,
    empty32,
    randn,
    same,
    scratch,
    within,
)
from gpt2_triton.kernels import fp8
from gpt2_triton.kernels.fp8 import full
from gpt2_triton.kernels.tuning import is_hopper
from gpt2_triton.operands import Branch, Linear, Norm, Targets

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Rounding to bf16 gives an error of 1.66e-3, or 2.42e-3 if tensor cores sum 6,400 products in
# 14 bits, which Hopper's kernels avoid.  Rounding to e4m3 gives 2.65e-2 in any case.  dW is
# stored in fp32, so its only error is from sums of 256 products in 14 bits: 2.1e-4.  The
# interpreter stores and adds in fp32.
ROUNDED, SUMMED = (2e-3 if is_hopper() else 3e-3, 3e-4) if GPU else (1e-6, 1e-6)
QUANTISED, QUANTISED_E5M2 = 3e-2, 7.5e-2
LOGITS = 1e-3 if GPU else 1e-6
# gelu' is stored in a byte, so each term of a sum is off by at most half a unit of the byte, 0.0025
SLOPES = 5e-3
AMAX = 1e-2  # GELU's kernels on Hopper hold tiles in fp16


def operand(
    R: int,
    C: int,
    scale: float,
    transposed: bool = True,
    value: Tensor | None = None,
    dtype: torch.dtype = E4M3,
) -> fp8.Fp8:
    """Return an operand full of NaN, with cells in which a kernel records its amax."""
    nan = functools.partial(torch.full, fill_value=0x7F, dtype=torch.uint8, device=DEVICE)
    cells = torch.zeros(K.AMAX_CELLS, dtype=torch.int32, device=DEVICE)
    rows = nan((R, C)).view(dtype)
    columns = nan((C, R)).view(dtype)
    return fp8.Fp8(rows, columns, torch.tensor([scale], device=DEVICE), cells, transposed, value)


def scale_for(most: float) -> float:
    return 2.0 ** math.floor(math.log2(448 / (2 * most)))


def quantised(x: Tensor, scale: float) -> Tensor:
    return (x.float() * scale).clamp(-448, 448).to(E4M3)


def activation(R: int, C: int, std: float = 1.0) -> fp8.Fp8:
    """Return an operand of normal numbers."""
    out = operand(R, C, scale_for(5.5 * std))
    out.rows.copy_(quantised(randn(R, C, scale=std), out.scale.item()))
    fp8.transpose(out.columns, out.rows, pairs=True)
    return out


def weight(N: int, C: int, std: float) -> fp8.Fp8:
    out = operand(N, C, scale_for(5.5 * std))
    out = dataclasses.replace(out, value=randn(N, C, scale=std))
    K.cast_operand(out)
    return out


def exact(x: fp8.Fp8) -> Tensor:
    return x.rows.double() / x.scale.double()


def in_pairs(x: Tensor) -> Tensor:
    """Return [R, C] of 8-bit floats transposed, as bytes, with each 16 rows in
    the order 0 8 1 9 ... 7 15.
    """
    order = torch.arange(len(x), device=x.device).view(-1, 2, 8).transpose(1, 2).flatten()
    return x.view(torch.uint8)[order].T.contiguous()


def of_operand(
    op: str, output: str, x: fp8.Fp8, want: Tensor, transposed: bool = False
) -> Iterator[Comparison]:
    """Compare an operand's rows and amax with exact numbers, and its columns with its rows."""
    yield within(op, output, exact(x), want, QUANTISED)
    assert x.amax is not None
    yield within(op, "amax", x.amax.view(F32).max(), want.abs().max(), AMAX)
    if transposed:
        yield same(op, "columns", x.columns.view(torch.uint8), in_pairs(x.rows))


def products(R: int, C: int) -> Iterator[Comparison]:
    """Compare qkv, fcproj with its residual, and dX of fc."""
    inp = activation(R, C)
    w = weight(3 * C, C, 0.02)
    b = randn(3 * C)
    out = empty(R, 3 * C)
    K.matmul(out, inp, Linear(w, b))
    yield within("fp8 matmul", "out", out, exact(inp) @ exact(w).T + b.double(), ROUNDED)
    inp = activation(R, 4 * C)
    w = weight(C, 4 * C, 0.02)
    b = randn(C)
    res = randn(R, C)
    out = empty(R, C)
    K.matmul_add(out, res, inp, Linear(w, b))
    want = exact(inp) @ exact(w).T + b.double() + res.double()
    yield within("fp8 matmul_add", "out", out, want, ROUNDED)
    dout = activation(R, 4 * C, 1e-3)
    w = weight(4 * C, C, 0.02)
    K.matmul_dx(out, dout, Linear(w))
    yield within("fp8 matmul_dx", "dinp", out, exact(dout) @ exact(w), ROUNDED)


def weight_gradients(R: int, C: int) -> Iterator[Comparison]:
    for N, k in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C)):
        dout = activation(R, N, 1e-3)
        inp = activation(R, k)
        dw = empty32(N, k)
        scratch = empty32(max(1, K.matmul_dw_scratch(R, "fp8", (N, k))))
        want = exact(dout).T @ exact(inp)
        for acc in (False, True):
            K.matmul_dw(dw, scratch, dout, inp, acc)
            output = f"dw{' added' * acc}"
            yield within("fp8 matmul_dw", output, dw.clone(), (1 + acc) * want, SUMMED)
    pair = (empty32(3 * C, C), empty32(C, 4 * C))
    dout = activation(R, 3 * C, 1e-3)
    inp = activation(R, C)
    dout2 = activation(R, C, 1e-3)
    inp2 = activation(R, 4 * C)
    scratch = empty32(1 << 24)
    K.matmul_dw_pair(*pair, scratch, dout, inp, dout2, inp2, False)
    for i, (dw, want) in enumerate(
        zip(pair, (exact(dout).T @ exact(inp), exact(dout2).T @ exact(inp2)))
    ):
        yield within("fp8 matmul_dw", f"pair {i}", dw, want, SUMMED)


def gelu(R: int, C: int) -> Iterator[Comparison]:
    """Compare fc with GELU, and then dX of fcproj, which uses the
    derivative of GELU that fc stored.
    """
    op = "fp8 matmul_act"
    std = C**-0.5
    N = 4 * C
    inp = activation(R, C)
    w = weight(N, C, std)
    b = randn(N, scale=0.1)
    out = operand(R, N, 32.0)
    slope = torch.zeros(R, N, device=DEVICE, dtype=torch.uint8)
    K.matmul_act(out, slope, inp, Linear(w, b), "gelu")
    pre = (exact(inp) @ exact(w).T + b.double()).requires_grad_()
    value = F.gelu(pre, approximate="tanh")
    yield from of_operand(op, "out", out, value.detach(), transposed=True)
    op = "fp8 matmul_dx_dact"
    dout = activation(R, C, 1e-3)
    w = weight(C, N, std)
    dpre = operand(R, N, scale_for(8e-3))
    dbias = empty32(N)
    scratch = empty32(R * N)
    K.matmul_dx_dact(dpre, dbias, None, scratch, dout, Linear(w), slope, False, "gelu")
    [want] = torch.autograd.grad(value, pre, exact(dout) @ exact(w))
    yield from of_operand(op, "dpre", dpre, want, transposed=True)
    yield within(op, "dbias", dbias, want.sum(0), SLOPES)


def norms(R: int, C: int) -> Iterator[Comparison]:
    x = randn(R, C)
    dout = randn(R, C)
    w = randn(C)
    b = randn(C)
    mean, rstd = empty32(2, R)
    dw, db, dbias = empty32(3, C)
    norm = Norm(w, b, mean, rstd, dw, db)
    scratch = empty32(K.layernorm_bwd_scratch(R, C, storage()))
    out = operand(R, C, 16.0)
    again = operand(R, C, 16.0)
    plain = empty(R, C)
    dx = operand(R, C, 16.0, value=empty(R, C))
    K.layernorm_fwd(out, norm, x)
    K.layernorm_fwd(dataclasses.replace(operand(R, C, 16.0), value=plain), norm, x)
    K.layernorm_bwd(dx, norm, Branch(dbias), again, scratch, dout, x, None, False)
    wide = x.double().requires_grad_()
    want = F.layer_norm(wide, (C,), w.double(), b.double())
    yield from of_operand("fp8 layernorm", "out", out, want.detach())
    yield same(
        "fp8 layernorm", "out again", again.rows.view(torch.uint8), out.rows.view(torch.uint8)
    )
    yield within("fp8 layernorm", "beside bf16", plain, want.detach(), ROUNDED)
    yield from of_operand(
        "fp8 layernorm", "dx", dx, torch.autograd.grad(want, wide, dout.double())[0]
    )


def attention(s: Sizes) -> Iterator[Comparison]:
    """Compare fp8 outputs with bf16 outputs; accuracy/kernels.py compares
    bf16 outputs with float64.
    """
    C = s.C
    qkv = randn(s.R, 3 * s.C)
    dout = randn(s.R, s.C)
    dbias = empty32(3 * s.C)
    lse = empty32(s.B, s.NH, s.T)
    delta = empty32(s.B, s.NH, s.T)
    out = operand(s.R, C, 32.0, value=empty(s.R, C))
    dqkv = operand(s.R, 3 * C, 32.0)
    plain = empty(s.R, 3 * C)
    K.attention_fwd(out, lse, qkv)
    for gradient in (dqkv, plain):
        K.attention_bwd(gradient, dbias, delta, scratch(s), dout, qkv, out, lse, False)
    assert out.value is not None
    yield from of_operand("fp8 attention", "out", out, out.value.double())
    yield from of_operand("fp8 attention", "dqkv", dqkv, plain.double(), transposed=True)


def head(R: int, C: int, V: int, Vp: int) -> Iterator[Comparison]:
    """Compare the logits' exponentials, and the head's gradients with products of the
    operands as they are stored.
    """
    op = "fp8 classifier"
    lnf = activation(R, C)
    wte = weight(Vp, C, 2 * C**-0.5)
    lnf, wte = (dataclasses.replace(x, value=exact(x).to(STORAGE)) for x in (lnf, wte))
    targets = torch.randint(V, (R,), dtype=torch.int32).to(DEVICE)
    zt = empty32(R)
    rowsum = empty32(K.classifier_fwd_scratch(R, Vp, "fp8"))
    p = dataclasses.replace(operand(R, Vp, math.nan, dtype=E5M2), amax=None)
    predicted = Targets(targets, zt)
    K.classifier_target(predicted, lnf, wte)
    K.classifier_fwd(p, rowsum, lnf, wte, predicted, V)
    z = exact(lnf) @ exact(wte).T
    at = targets.long()[:, None]
    target = z.gather(1, at)
    yield within(op, "zt", zt, target[:, 0] / math.log(2), LOGITS)
    want = (z - target).exp().scatter(1, at, 0.0)
    want[:, V:] = 0
    units = 2 ** (1 + rowsum[2 * R : 3 * R].double()).log2().floor()
    want /= units[:, None]
    # a logit's absolute error is a relative error of its exponential
    of_exp = LOGITS * z.abs().max().item()
    yield within(op, "p", exact(p), want, QUANTISED_E5M2 + of_exp)
    yield same(op, "columns", p.columns.view(torch.uint8), in_pairs(p.rows))
    yield within(op, "row sums", rowsum[:R], want.sum(1), of_exp)
    losses, rs, ks = empty32(3, R)
    dln = empty(R, C)
    dw = empty32(Vp, C)
    lns = dataclasses.replace(operand(R, C, math.nan, dtype=E5M2), amax=None, rows=lnf.rows[:0])
    step_in = torch.tensor([0, 0, 0, 1 / R, 0, 0, 0, 0], dtype=F32, device=DEVICE)
    K.classifier_loss(losses, rs, ks, lns, rowsum, lnf, predicted, step_in, False)
    stored = (full(lnf).float() * (rs * lns.scale)[:, None]).to(E5M2)
    yield same(op, "lns", lns.columns.view(torch.uint8), in_pairs(stored))
    K.classifier_dx(dln, p, wte, rs, ks, targets)
    want = (
        rs.double()[:, None] * (exact(p) @ exact(wte))
        + ks.double()[:, None] * exact(wte)[targets.long()]
    )
    yield within(op, "dln", dln, want, ROUNDED)
    K.matmul_dw(dw, empty32(max(1, K.matmul_dw_scratch(R, "fp8", (Vp, C)))), p, lns, False)
    want = exact(p).T @ (stored.double() / lns.scale.double())
    yield within(op, "dwte", dw, want, 2 * SUMMED)


def casts(N: int, C: int) -> Iterator[Comparison]:
    shapes = ((3 * C, C), (C, C), (N, C), (C, N))
    outs = [weight(*shape, 0.02) for shape in shapes]
    K.cast_weights(*outs)
    for out in outs:
        want = quantised(fp8.full(out), out.scale.item()).view(torch.uint8)
        yield same("fp8 cast_weights", "rows", out.rows.view(torch.uint8), want)
        yield same(
            "fp8 cast_weights", "columns", out.columns.view(torch.uint8), want.T.contiguous()
        )


def scales(tensors: int) -> Iterator[Comparison]:
    """Compare the scales after a step, and the counts of an operand's elements."""
    largest = 10 * randn(tensors, K.AMAX_CELLS, dtype=F32).abs()
    history = randn(tensors, 16, dtype=F32).abs()
    scale = empty32(tensors)
    squares = torch.ones(1, device=DEVICE)
    step_out = torch.ones(6, device=DEVICE)
    most = torch.cat([largest, history[:, :-1]], 1).amax(1)
    cells = largest.view(torch.int32)
    K.check_amax(squares, cells)
    yield same("fp8 check_amax", "squares", squares, torch.ones_like(squares))
    K.roll_scales(scale, history, cells, step_out)
    yield same(
        "fp8 roll_scales",
        "scale",
        scale,
        torch.exp2(torch.floor(torch.log2(448 / (2 * most.double())))).float(),
    )
    yield same("fp8 roll_scales", "cleared", 1.0 + cells, torch.ones_like(largest))
    x = activation(256, 256, 4.0)
    counts = empty32(2, K.stats_parts())
    x.rows[0] = 448.0
    K.fp8_stats(counts, x, False)
    want = torch.stack([(x.rows.float().abs() == size).sum() for size in (448, 0)]).float()
    yield same("fp8_stats", "counts", counts.sum(1), want)


def storage() -> str:
    return "bf16" if STORAGE == BF16 else "fp32"


def comparisons(s: Sizes) -> Iterator[Comparison]:
    """Yield all comparisons at the channels of 124M and of 1558M, and with
    rows that fill no whole tile.
    """
    for R, C in ((s.R, s.C), (s.R, 1600), (336, 320)) if GPU else ((s.R, s.C),):
        for check in (products, weight_gradients, gelu, norms):
            yield from check(R, C)
    yield from casts(4 * s.C, s.C)
    yield from scales(40)
    yield from attention(s)
    yield from head(s.R // s.B, s.C, s.V, s.Vp)
