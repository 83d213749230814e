"""Dropout (Srivastava et al. 2014) of what joins the residual stream: the embedding's
sum, and each layer's branches.

forward    x[0] = mask(wte[ids] + wpe),  x[i] = x[i-1] + mask(branch)
backward   the branch's gradient is mask(dx[i]); layernorm_bwd stores it beside dx[i]

mask(x) is x / (1 - p), or 0 with probability p; p is rounded to a multiple of 2^-16.  A mask is
not kept: Philox gives it again, keyed by seed, step, residual point i, and the element's number
among the elements of the step.  The first row of a micro-batch is read from step_key[ROW],
since a CUDA graph replays the launches.  So masks depend neither on ranks, micro-batches and
blocks, nor on what is recomputed.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.philox import DROPOUT, step_seed, words_at
from gpt2_triton.kernels.step_io import ROW, STEP
from gpt2_triton.kernels.tuning import flat_block
from gpt2_triton.operands import Dropout

SITES = tl.constexpr(256)  # Philox's purpose is DROPOUT + SITES * i


@triton.jit
def masked(x, eights, step_key_ptr, i, DROPPED: tl.constexpr):
    """Return mask(x) of fp32 x [..., N]; eights, int64 [..., N / 8], number the groups
    of 8 elements of the step.
    """
    purpose = (i * SITES + DROPOUT).to(tl.uint32)
    words = words_at(step_seed(step_key_ptr), eights, tl.load(step_key_ptr + STEP), purpose)
    halves = tl.interleave(words & 0xFFFF, words >> 16)
    return tl.where(halves >= DROPPED, x * (65536.0 / (65536 - DROPPED)), 0.0)


@triton.jit
def masked_rows(x, r, C, step_key_ptr, i, DROPPED: tl.constexpr):
    """Return mask(x) of fp32 x [rows, columns from 0 on]; r are the rows' numbers
    in the micro-batch, int64.
    """
    row = tl.load(step_key_ptr + ROW) + r
    eights = row[:, None] * (C // 8) + tl.arange(0, x.shape[1] // 8)[None, :]
    return masked(x, eights, step_key_ptr, i, DROPPED)


@triton.jit(do_not_specialize=["i"])
def _dropout_kernel(
    x_ptr, res_ptr, step_key_ptr, n, C, i, DROPPED: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    eights = (tl.load(step_key_ptr + ROW).to(tl.int64) * C + first) // 8 + tl.arange(0, BLOCK // 8)
    x = masked(x, eights, step_key_ptr, i, DROPPED)
    if res_ptr is not None:
        x += tl.load(res_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, x, mask=at < n)


@contract("x[R,C]+ <- res[R,C]? dropout.step_key[4]")
def dropout(x: Tensor, res: Tensor | None, dropout: Dropout) -> None:
    """Write x = mask(x) (+ res).  C is a multiple of 8."""
    step_key, i, p = dropout
    n = x.numel()
    block = flat_block(n, 1024)
    _dropout_kernel[(triton.cdiv(n, block),)](
        x, res, step_key, n, x.shape[1], i, DROPPED=dropped(p), BLOCK=block, num_warps=4
    )


def dropped(p: float) -> int:
    """Return how many of 65536 elements dropout of probability p drops."""
    return min(round(p * 65536), 65535)
