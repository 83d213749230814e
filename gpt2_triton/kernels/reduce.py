"""Reductions in a fixed order: partial sums per program, then one more kernel; two runs agree bit for bit.

column_sums  out[n] (+)= sum_p part[p, n]        finishes split-K products, bias and layernorm gradients
sum_squares  out = sum_i g[i]^2                  the square of the gradient norm over a flat range
clip_factor  norm, min(1, clip / norm), finite   what AdamW multiplies gradients with
loss_sum     out = loss_scale * sum_r losses[r]
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.tuned import INTERPRET, next_power_of_2


@triton.jit
def _column_sums_kernel(
    out_ptr, part_ptr, P, N, ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P).to(tl.int64)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, P, BLOCK_P):
        rows = first + p
        mask = (rows < P)[:, None] & (n < N)[None, :]
        total += tl.sum(tl.load(part_ptr + rows[:, None] * N + n[None, :], mask=mask, other=0.0), 0)
    if ACC:
        total += tl.load(out_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + n, total, mask=n < N)


def column_sums(out: Tensor, part: Tensor, P: int, acc: bool) -> None:
    """out[n] (+)= sum over p of part[p, n]; `out` is fp32 of N elements in any shape, `part` the first P*N elements of an fp32 scratch."""
    N = out.numel()
    block_p = min(next_power_of_2(P), 64)
    block_n = min(next_power_of_2(N), 1 << 18) if INTERPRET else max(64, 4096 // block_p)
    _column_sums_kernel[(triton.cdiv(N, block_n),)](
        out, part, P, N, ACC=acc, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4
    )
