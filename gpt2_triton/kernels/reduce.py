"""Reductions in a fixed order, so that two runs agree bit for bit: programs sum parts,
then a kernel adds the parts.

column_sums   out[n] (+)= sum_p part[p, n]        the end of bias and layernorm gradients, up
                                                  to three at once
sum_squares   out (+)= sum_i g[i]^2               the square of the gradient norm over a flat range
clip_factor   norm, min(1, clip / norm), finite   AdamW multiplies gradients with the factor
loss_sum      out = loss_scale * sum_r losses[r]
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.step_io import APPLY, CLIP, CLIP_FACTOR, LOSS, LOSS_SCALE, NORM
from gpt2_triton.kernels.tuning import INTERPRET, flat_block, next_power_of_2

SUM_BLOCK = 16384


@triton.jit(do_not_specialize=["P"])  # a count of rows: divisibility gains nothing
def _column_sums_kernel(
    out_ptr, second_ptr, third_ptr, part_ptr, P, N, ACC: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    # two conditions each: the first is a constant, so a pointer that is None is never chosen
    if second_ptr is not None:
        if which == 1:
            out_ptr = second_ptr
    if third_ptr is not None:
        if which == 2:
            out_ptr = third_ptr
    part_ptr += which.to(tl.int64) * P * N
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P).to(tl.int64)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, P, BLOCK_P):
        rows = first + p
        mask = (rows < P)[:, None] & (n < N)[None, :]
        part = tl.load(part_ptr + rows[:, None] * N + n[None, :], mask=mask, other=0.0)
        total += tl.sum(part, 0)
    if ACC:
        total += tl.load(out_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + n, total, mask=n < N)


@contract("out[*]+ second[*]?+ third[*]?+ <- part[*]")
def column_sums(
    out: Tensor, second: Tensor | None, third: Tensor | None, part: Tensor, P: int, acc: bool
) -> None:
    """out[n] (+)= sum over p of part[0, p, n], second of part[1], third of
    part[2]; only launchers call it.
    """
    N = out.numel()
    outs = 1 + (second is not None) + (third is not None)
    block_p = min(next_power_of_2(P), 64)
    if INTERPRET:
        block_n = min(next_power_of_2(N), 1 << 18)
    elif N < 1 << 16:  # few columns: blocks of eight, one sector, keep every multiprocessor busy
        block_p = min(next_power_of_2(P), 512)
        block_n = 8
    else:
        block_n = max(64, 4096 // block_p)
    _column_sums_kernel[(triton.cdiv(N, block_n), outs)](
        out, second, third, part, P, N, ACC=acc, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4
    )


@triton.jit
def _sum_squares_kernel(part_ptr, g_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + i, mask=i < n, other=0.0)
    tl.store(part_ptr + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _sum_kernel(out_ptr, x_ptr, scale_ptr, n, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """Add n numbers in one program, BLOCK lanes wide, in a fixed order."""
    lanes = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        lanes += tl.load(x_ptr + i, mask=i < n, other=0.0)
    total = tl.sum(lanes, 0)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr)
    if ACC:
        total += tl.load(out_ptr)
    tl.store(out_ptr, total)


@triton.jit
def _clip_factor_kernel(step_out_ptr, sumsq_ptr, step_in_ptr):
    norm = tl.sqrt(tl.load(sumsq_ptr))
    loss = tl.load(step_out_ptr + LOSS)
    clip = tl.load(step_in_ptr + CLIP)
    factor = tl.minimum(clip / (norm + 1e-6), 1.0)
    finite = (norm < float("inf")) & (tl.abs(loss) < float("inf"))  # a comparison with NaN is false
    tl.store(step_out_ptr + NORM, norm)
    tl.store(step_out_ptr + CLIP_FACTOR, tl.where(clip > 0.0, factor, 1.0))
    tl.store(step_out_ptr + APPLY, tl.where(finite, 1.0, 0.0))


@contract("out[1]+ scratch[*] <- g[n]")
def sum_squares(out: Tensor, scratch: Tensor, g: Tensor, acc: bool = False) -> None:
    """out (+)= sum of g^2, over fixed blocks in a fixed order."""
    n = g.numel()
    block = flat_block(n, SUM_BLOCK)
    blocks = triton.cdiv(n, block)
    _sum_squares_kernel[(blocks,)](scratch, g, n, BLOCK=block, num_warps=8)
    _sum_kernel[(1,)](
        out, scratch, None, blocks, ACC=acc, BLOCK=min(next_power_of_2(blocks), 8192), num_warps=8
    )


def sum_squares_scratch(n: int) -> int:
    """Return the fp32 elements: a partial sum per block."""
    return triton.cdiv(n, flat_block(n, SUM_BLOCK))


@contract("out[1] <- losses[R] step_in[8]")
def loss_sum(out: Tensor, losses: Tensor, step_in: Tensor) -> None:
    """out = loss scale * sum of losses."""
    R = losses.numel()
    _sum_kernel[(1,)](
        out,
        losses,
        step_in[LOSS_SCALE.value :],
        R,
        ACC=False,
        BLOCK=min(next_power_of_2(R), 8192),
        num_warps=8,
    )


@contract("step_out[*] <- sumsq[1] step_in[8]")
def clip_factor(step_out: Tensor, sumsq: Tensor, step_in: Tensor) -> None:
    """Write step_out's NORM, CLIP_FACTOR (1 if CLIP is 0) and APPLY (1 if norm and
    loss are finite, else 0).
    """
    _clip_factor_kernel[(1,)](step_out, sumsq, step_in)
