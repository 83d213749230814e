"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for the
weight matrices of the layers.

    g  = grad * clip factor
    m += alpha * (g - m),    x = m + alpha * (g - m)     alpha = 1 - momentum; x is a step
                                                         ahead (Nesterov)
    x  = x / (1.02 * ||x||)                              Frobenius norm: no singular value
                                                         is above 1
    x  = a * x + (b * A + c * A A) x,    A = x x^T       repeated: an odd polynomial of each
                                                         singular value
    w -= lr * (scale * x + decay * w)                    scale = 0.2 * sqrt(longer side)

The polynomials (model/muon.py) bring all singular values close to 1: the update is nearly the polar
factor U V^T of x = U S V^T.  Its elements have an rms of 1 / sqrt(longer side).  The scale makes
the rms 0.2, about AdamW's (Liu et al.  2025, https://arxiv.org/abs/2502.16982).

Each launch takes all matrices of one shape, [k, M, N], each of them contiguous, with any stride
between them.  The bits of a matrix do not depend on the others.  If M > N, A is x^T x, and the
polynomial is multiplied from the right.  A and b A + c A A are symmetric bit for bit: only tiles
on and below the diagonal are computed, and each is also stored transposed.  Sums are fp32 in a
fixed order, and none is split.

muon_momentum and muon_update take [L, n], the same n elements of each layer's matrices,
with any stride between layers.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.blocks import (
    describe,
    describe_halves,
    load_block,
    rounded,
    store_block,
)
from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import decayed_update, dot
from gpt2_triton.kernels.step_io import APPLY, CLIP_FACTOR, LR
from gpt2_triton.kernels.tiles import halves, tile_corner
from gpt2_triton.kernels.tuning import dtype_name, flat_block, next_power_of_2, tuned
from gpt2_triton.kernels.weights import load_weights, random_words, store_moment, store_weights
from gpt2_triton.operands import Matrices, Step

# above 1, since rounding a matrix to bf16 may raise its singular values
NORM_FACTOR = tl.constexpr(1.02)
SQUARES_BLOCK = 16384
SMALLEST_NORM = tl.constexpr(1e-12)  # a matrix of zeros stays zeros


@triton.jit(do_not_specialize=["first"])
def _momentum_kernel(
    x_ptr, m_ptr, g_ptr, step_out_ptr, step_key_ptr, n, x_stride, m_stride, g_stride, first,
    distance, alpha, RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(step_out_ptr + APPLY) == 0.0:
        return
    layer = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    i = at + tl.arange(0, BLOCK)
    mask = i < n
    g = tl.load(g_ptr + layer * g_stride + i, mask=mask, other=0.0)
    g *= tl.load(step_out_ptr + CLIP_FACTOR)
    m = tl.load(m_ptr + layer * m_stride + i, mask=mask, other=0.0).to(tl.float32)
    m += alpha * (g - m)
    words = random_words(step_key_ptr, first + layer * distance + at, RANDOM, BLOCK)
    store_moment(m, m_ptr + layer * m_stride, i, mask, words)
    x_ptr += layer * x_stride
    tl.store(x_ptr + i, (m + alpha * (g - m)).to(x_ptr.dtype.element_ty), mask=mask)


@contract("c.x[L,n]~ c.m[L,n]~+ <- c.g[L,n]~ step.out[*] step.key[4]")
def muon_momentum(c: Matrices, step: Step) -> None:
    """Update m, and write the matrices x to orthogonalise."""
    L, n = c.x.shape
    row = _flat_row(c.x)
    _momentum_kernel[(triton.cdiv(n, row["BLOCK"]), L)](
        c.x, c.m, c.g, step.out, step.key, n, c.x.stride(0), c.m.stride(0), c.g.stride(0), c.first,
        c.distance, 1.0 - c.momentum, RANDOM=dtype_name(c.m) == "bf16", **row,
    )  # fmt: skip


def _flat_row(x: Tensor) -> dict[str, int]:
    return tuned("adamw", dtype_name(x), BLOCK=x.shape[1])  # adamw's kernel has the same form


@triton.jit
def _squares_kernel(part_ptr, x_ptr, n, x_stride, BLOCK: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + matrix * x_stride + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(part_ptr + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def _normalise_kernel(
    out_ptr, x_ptr, part_ptr, n, parts, out_stride, x_stride, BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    squares = tl.sum(tl.load(part_ptr + matrix * parts + p, mask=p < parts, other=0.0), 0)
    scale = 1.0 / tl.maximum(tl.sqrt(squares) * NORM_FACTOR, SMALLEST_NORM)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + matrix * x_stride + i, mask=i < n, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + matrix * out_stride + i, x.to(out_ptr.dtype.element_ty), mask=i < n)


@contract("out[k,M,N]~ scratch[*] <- x[k,M,N]~")
def muon_normalise(out: Tensor, scratch: Tensor, x: Tensor) -> None:
    """Write out = x / (1.02 * ||x||) for each of k matrices; a matrix of zeros stays zeros."""
    k, n = x.shape[0], x.shape[1] * x.shape[2]
    sums = flat_block(n, SQUARES_BLOCK)
    block = flat_block(n, 1024)
    parts = triton.cdiv(n, sums)
    _squares_kernel[(parts, k)](scratch, x, n, x.stride(0), BLOCK=sums, num_warps=8)
    _normalise_kernel[(triton.cdiv(n, block), k)](
        out,
        x,
        scratch,
        n,
        parts,
        out.stride(0),
        x.stride(0),
        BLOCK_P=next_power_of_2(parts),
        BLOCK=block,
        num_warps=4,
    )


def muon_normalise_scratch(k: int, M: int, N: int) -> int:
    """Return the fp32 elements: the partial sums of k matrices."""
    return k * triton.cdiv(M * N, flat_block(M * N, SQUARES_BLOCK))


@triton.jit
def lower_tile(item, tiles):
    """Return row and column of tile number `item` on and below the diagonal of tiles x tiles.

    The rows of tiles are taken in pairs, the last with the first, so
    that all pairs are equally long.
    """
    length = tiles | 1
    row = tiles - 1 - item // length
    column = item % length
    second = column > row
    return tl.where(second, length - 1 - row - 1, row), tl.where(second, column - row - 1, column)


@triton.jit
def _symmetric_kernel(
    out_desc, x_desc, add_desc, C, K, add_factor, factor, TALL: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write out = add_factor * add + factor * (x x^T, or x^T x if TALL), [C, C], of one matrix."""
    tiles = tl.cdiv(C, BLOCK)
    items = tiles * (tiles + 1) // 2
    i = tl.program_id(0) // items
    tile_m, tile_n = lower_tile(tl.program_id(0) % items, tiles)
    m = tile_m * BLOCK
    n = tile_n * BLOCK
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK_K):
        if TALL:
            left = load_block(x_desc, [i, k, m], TRANSPOSED=True)
            acc = dot(left, load_block(x_desc, [i, k, n]), acc)
        else:
            acc = dot(load_block(x_desc, [i, m, k]), load_block(x_desc, [i, n, k]).T, acc)
    acc *= factor
    if add_desc is not None:
        acc += add_factor * load_block(add_desc, [i, m, n]).to(tl.float32)
    out = rounded(acc, out_desc)
    mirrored = out.T
    if tile_m == tile_n:
        below = tl.arange(0, BLOCK)[:, None] >= tl.arange(0, BLOCK)[None, :]
        store_block(out_desc, [i, m, n], tl.where(below, out, mirrored))
    else:
        store_block(out_desc, [i, m, n], out)
        store_block(out_desc, [i, n, m], mirrored)


def _launch_symmetric(
    out: Tensor, x: Tensor, add: Tensor | None, add_factor: float, factor: float, tall: bool
) -> None:
    k, C, _ = out.shape
    K = x.shape[1] if tall else x.shape[2]
    row = tuned("muon_symmetric", dtype_name(x), BLOCK=C, BLOCK_K=K)
    block, block_k = row["BLOCK"], row["BLOCK_K"]
    x_desc = describe(x, 1, block_k, block) if tall else describe(x, 1, block, block_k)
    out_desc = describe(out, 1, block, block)
    add_desc = describe(add, 1, block, block)
    tiles = triton.cdiv(C, block)
    _symmetric_kernel[(k * tiles * (tiles + 1) // 2,)](
        out_desc, x_desc, add_desc, C, K, add_factor, factor, TALL=tall, **row
    )


@contract("gram[k,C,C] <- x[k,M,N]~")
def muon_gram(gram: Tensor, x: Tensor) -> None:
    """Write gram = x x^T, or x^T x if M > N: the smaller of the two."""
    M, N = x.shape[1:]
    assert gram.shape[1] == min(M, N), (
        f"muon_gram: gram has {gram.shape[1]} rows, expected {min(M, N)}"
    )
    _launch_symmetric(gram, x, None, 0.0, 1.0, M > N)


@contract("poly[k,C,C] <- gram[k,C,C]")
def muon_poly(poly: Tensor, gram: Tensor, b: float, c: float) -> None:
    """Write poly = b * gram + c * gram gram, for symmetric gram."""
    _launch_symmetric(poly, gram, gram, b, c, False)


@triton.jit
def _apply_kernel(
    out_desc, left_desc, right_desc, x_desc, M, N, K, a,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Write one tile of out[M, N] = a * x + left[M, K] right[K, N]."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    i = tl.program_id(0) // tiles
    m, n = tile_corner(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = dot(load_block(left_desc, [i, m, k]), load_block(right_desc, [i, k, n]), acc)
    left, right = halves(acc)
    left += a * load_block(x_desc, [i, m, n]).to(tl.float32)
    store_block(out_desc, [i, m, n], left)
    right += a * load_block(x_desc, [i, m, n + BLOCK_N // 2]).to(tl.float32)
    store_block(out_desc, [i, m, n + BLOCK_N // 2], right)


@contract("out[k,M,N]~ <- x[k,M,N]~ poly[k,C,C]")
def muon_apply(out: Tensor, x: Tensor, poly: Tensor, a: float) -> None:
    """Write out = a * x + poly x, or a * x + x poly if M > N."""
    (k, M, N), C = x.shape, poly.shape[1]
    assert min(M, N) == C, f"muon_apply: poly has {C} rows, expected {min(M, N)}"
    row = tuned("muon_apply", dtype_name(x), BLOCK_M=M, BLOCK_N=N, BLOCK_K=C)
    block_m = row["BLOCK_M"]
    block_n = row["BLOCK_N"]
    block_k = row["BLOCK_K"]
    left, right = (x, poly) if M > N else (poly, x)
    _apply_kernel[(k * triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        describe_halves(out, 1, block_m, block_n), describe(left, 1, block_m, block_k),
        describe(right, 1, block_k, block_n), describe_halves(x, 1, block_m, block_n), M, N, C, a,
        **row,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _update_kernel(
    w_ptr, low_ptr, x_ptr, step_out_ptr, step_in_ptr, step_key_ptr, n, w_stride, low_stride,
    x_stride, first, distance, decay, scale, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(step_out_ptr + APPLY) == 0.0:
        return
    layer = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    i = at + tl.arange(0, BLOCK)
    mask = i < n
    w_ptr += layer * w_stride
    if low_ptr is not None:
        low_ptr += layer * low_stride
    w = load_weights(w_ptr, low_ptr, i, mask)
    x = tl.load(x_ptr + layer * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    w -= decayed_update(w, scale * x, tl.load(step_in_ptr + LR), decay)
    words = random_words(step_key_ptr, first + layer * distance + at, STOCHASTIC, BLOCK)
    store_weights(w, w_ptr, low_ptr, i, mask, words, STOCHASTIC)


@contract("c.w[L,n]~ c.low[L,n]~?+ <- c.x[L,n]~ step.out[*] step.inp[8] step.key[4]")
def muon_update(c: Matrices, step: Step) -> None:
    """Update w (and low) by lr * (scale * x + decay * w)."""
    L, n = c.w.shape
    dtype = dtype_name(c.w)
    row = _flat_row(c.w)
    low_stride = 0 if c.low is None else c.low.stride(0)
    _update_kernel[(triton.cdiv(n, row["BLOCK"]), L)](
        c.w, c.low, c.x, step.out, step.inp, step.key, n, c.w.stride(0), low_stride, c.x.stride(0),
        c.first, c.distance, c.decay, c.scale, STOCHASTIC=dtype == "bf16" and c.low is None, **row,
    )  # fmt: skip
