"""RMSNorm of each head of q and k before its rotation (Henry et al. 2020,
https://arxiv.org/abs/2010.04245), inside the kernels that rotate; weights as in Qwen3.

forward    rstd = 1 / sqrt(sum_HS(x^2) / HS + eps),  xhat = x * rstd,  y = rope(w * xhat)
backward   dz = rope back of dy,  z = rope back of y,  xhat = z / w
           dx = rstd * (w * dz - xhat * sum_HS(dz * z) / HS)
           dw (+)= sum over rows and heads of dz * xhat, as the sum of dz * z, over w

q's heads share a w, and k's heads another: w is [2, HS].  The product that gives q and k norms and
rotates them in its epilogue, and keeps only y, which attention reads, and rstd, fp32 [R, heads].
Attention's backward pass reads y anyway, so it takes the gradient in its own epilogue.  Passes over
q, k and their gradients would move five times the bytes of q and k: 4% of a step of llama:c768 in
fp8, by bandwidth.

xhat = z / w fails where w is near 0.  z is w * xhat, and an error: y is rounded, and a rotation
mixes the elements of a pair.  So the error is about `noise` times the weight of the partner.
xhat = z * w / (w^2 + (noise * partner)^2) is the estimate with the least squared error.  It is
z / w unless the weights of a pair differ by a factor near 1 / noise, and 0 for a weight of 0.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.blocks import load_block
from gpt2_triton.kernels.reduce import column_sums
from gpt2_triton.kernels.rope import cos_sin, head_halves, rotated_back, rotated_halves
from gpt2_triton.kernels.tuning import INTERPRET
from gpt2_triton.operands import HeadNorm

PARTS = 256  # partial sums of dw, at most


@triton.jit
def _normed_halves(x1, x2, r, R, head, rope):
    """Return the halves [rows, heads, HS/2] of w * xhat, and store rstd."""
    HS: tl.constexpr = rope.HS
    heads = rope.columns // HS
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 2) / HS + rope.eps)
    at = r.to(tl.int64)[:, None] * heads + head[None, :]
    tl.store(rope.rstd + at, rstd, mask=(r < R)[:, None] & (head < heads)[None, :])
    w = rope.w + tl.where(head < rope.NH, 0, HS)[:, None] + tl.arange(0, HS // 2)[None, :]
    w1 = tl.load(w).to(tl.float32)
    w2 = tl.load(w + HS // 2).to(tl.float32)
    return x1 * rstd[:, :, None] * w1[None, :, :], x2 * rstd[:, :, None] * w2[None, :, :]


@triton.jit
def rotated_before(x, m, n, R, rope):
    """Return x, a block from row m and column n on, with the heads before rope.columns normed, if
    `rope`, RopeArguments, has a w, and rotated.
    """
    HS: tl.constexpr = rope.HS
    r = m + tl.arange(0, x.shape[0])
    cos, sin = cos_sin(rope.table, r % rope.T, HS)
    x1, x2 = head_halves(x, HS)
    if rope.w is not None:
        head = n // HS + tl.arange(0, x.shape[1] // HS)
        x1, x2 = _normed_halves(x1, x2, r, R, head, rope)
    c = n + tl.arange(0, x.shape[1])
    return tl.where((c < rope.columns)[None, :], rotated_halves(x1, x2, cos, sin), x)


@triton.jit
def _inverse(w_ptr, NOISE: tl.constexpr, HS: tl.constexpr):
    """Return what xhat is of z: w / (w^2 + (noise * partner)^2)."""
    d = tl.arange(0, HS)
    w = tl.load(w_ptr + d).to(tl.float32)
    error = NOISE * tl.load(w_ptr + (d + HS // 2) % HS).to(tl.float32)
    root = tl.rsqrt(tl.maximum(w * w + error * error, 1e-30))
    return w * root * root


@triton.jit
def head_norm_bwd(dy, y, cos, sin, w_ptr, rstd, NOISE: tl.constexpr, HS: tl.constexpr):
    """Return dx, and dz * z, of a head's dy and y [rows, HS]."""
    dz = rotated_back(dy, cos, sin, HS)
    z = rotated_back(y, cos, sin, HS)
    terms = dz * z
    mean = tl.sum(terms, 1) / HS
    w = tl.load(w_ptr + tl.arange(0, HS)).to(tl.float32)
    xhat = z * _inverse(w_ptr, NOISE, HS)[None, :]
    return (dz * w[None, :] - xhat * mean[:, None]) * rstd[:, None], terms


@triton.jit
def input_gradient(
    dy, scale, y_desc, at, T, heads, rope_ptr, w_ptr, W: tl.constexpr, rstd_ptr,
    NOISE: tl.constexpr, HS: tl.constexpr,
):  # fmt: skip
    """Return scale * dy, where dy is the gradient of the block of y_desc at `at`, as it was before
    the rotation and before the norm with row W of w, if there are these.  Return also the terms
    that weight_gradient sums, or without a norm the gradient again.
    """
    i = at[2] + tl.arange(0, dy.shape[0])
    if w_ptr is not None:
        cos, sin = cos_sin(rope_ptr, tl.minimum(i, T - 1), HS)
        rstd_ptr += (tl.cast(at[0], tl.int64) * T + i) * heads + at[1]
        rstd = tl.load(rstd_ptr, mask=i < T, other=0.0) * scale
        # loaded again: through the loop of attention registers do not hold it
        y = load_block(y_desc, at).to(tl.float32)
        dx, terms = head_norm_bwd(dy, y, cos, sin, w_ptr + W * HS, rstd, NOISE, HS)
    else:
        dx = dy * scale
        if rope_ptr is not None:
            cos, sin = cos_sin(rope_ptr, tl.minimum(i, T - 1), HS)
            dx = rotated_back(dx, cos, sin, HS)
        terms = dx
    return dx, terms


def noise(y: Tensor) -> float:
    """Return the largest relative error of a stored element."""
    return 2.0**-9 if y.element_size() == 2 else 2.0**-25


@triton.jit
def _weight_terms_kernel(
    sums_ptr, part_ptr, w_ptr, q_rows, k_rows, factor, NOISE: tl.constexpr, HS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum each program's blocks of part's rows, of q or of k, and multiply by dw's factors."""
    part = tl.program_id(0)
    of_k = tl.program_id(1)
    rows = tl.where(of_k == 0, q_rows, k_rows)
    part_ptr += (of_k * q_rows).to(tl.int64) * HS
    d = tl.arange(0, HS)
    total = tl.zeros((HS,), tl.float32)
    for first in range(part * BLOCK, rows, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        at = i.to(tl.int64)[:, None] * HS + d[None, :]
        total += tl.sum(tl.load(part_ptr + at, mask=(i < rows)[:, None], other=0.0), 0)
    total *= factor * _inverse(w_ptr + of_k * HS, NOISE, HS)
    tl.store(sums_ptr + (of_k * tl.num_programs(0) + part) * HS + d, total)


def weight_gradient(
    norm: HeadNorm, scratch: Tensor, q_rows: int, k_rows: int, factor: float, acc: bool
) -> None:
    """dw (+)= factor times the sums of dz * z, over w.  `scratch` has [2, PARTS, HS] elements for
    sums, then rows of HS terms: q's, and k's.
    """
    HS = norm.w.shape[1]
    sums = scratch[: 2 * PARTS * HS]
    terms = scratch[2 * PARTS * HS :]
    block = 1024 if INTERPRET else 64
    parts = min(PARTS, triton.cdiv(q_rows, block))
    _weight_terms_kernel[(parts, 2)](
        sums, terms, norm.w, q_rows, k_rows, factor, NOISE=noise(norm.w), HS=HS, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    column_sums(norm.dw[0], norm.dw[1], None, sums, parts, acc)
