"""Statistics of tensors: sums and maxima over the elements, one partial result per
program, finished on the host.

tensor_stats     sum of x^2, largest |x|, non-finite elements            of an activation
fp8_stats        elements at the largest number and at 0                  of an fp8 operand
parameter_stats  tensor_stats of a gradient, sum of w^2, sum of (the
                 update AdamW is about to make)^2
muon_stats       the same before an update by Muon

Sums and maxima are over the finite elements.  Each kernel reads its
tensors once; that bounds its time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import adamw_moments, adamw_update, decayed_update
from gpt2_triton.kernels.e4m3 import widened
from gpt2_triton.kernels.fp8 import Fp8, Operand, full
from gpt2_triton.kernels.step_io import APPLY, CLIP_FACTOR, LR, M_CORRECTION, V_CORRECTION
from gpt2_triton.kernels.tuning import INTERPRET, next_power_of_2
from gpt2_triton.operands import Betas, Matrices, Span, Step


@triton.jit
def _tensor_stats_kernel(
    out_ptr, x_ptr, scale_ptr, n, ACC: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    squares = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    non_finite = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, PARTS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        size = tl.abs(widened(tl.load(x_ptr + i, mask=i < n, other=0.0)))
        if scale_ptr is not None:
            size /= tl.load(scale_ptr)
        finite = size < float("inf")
        size = tl.where(finite, size, 0.0)
        squares += size * size
        largest = tl.maximum(largest, size)
        non_finite += tl.where(finite, 0.0, 1.0)
    out = out_ptr + tl.program_id(0)
    total = tl.sum(squares, 0)
    most = tl.max(largest, 0)
    count = tl.sum(non_finite, 0)
    if ACC:
        total += tl.load(out)
        most = tl.maximum(most, tl.load(out + PARTS))
        count += tl.load(out + 2 * PARTS)
    tl.store(out, total)
    tl.store(out + PARTS, most)
    tl.store(out + 2 * PARTS, count)


@triton.jit
def _parameter_stats_kernel(
    out_ptr, w_ptr, m_ptr, v_ptr, x_ptr, g_ptr, step_out_ptr, step_in_ptr, n, decay, lr_factor,
    scale, alpha1, alpha2, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    squares = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    non_finite = tl.zeros((BLOCK,), tl.float32)
    w_squares = tl.zeros((BLOCK,), tl.float32)
    update_squares = tl.zeros((BLOCK,), tl.float32)
    # 0: the step is skipped, and there is neither an update nor an x
    applied = tl.load(step_out_ptr + APPLY)
    written = tl.where(applied == 1.0, n, 0)  # elements of x
    lr = tl.load(step_in_ptr + LR) * lr_factor * applied
    factor = tl.load(step_out_ptr + CLIP_FACTOR)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, PARTS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        mask = i < n
        g = tl.load(g_ptr + i, mask=mask, other=0.0)
        finite = tl.abs(g) < float("inf")
        g = tl.where(finite, g, 0.0)
        squares += g * g
        largest = tl.maximum(largest, tl.abs(g))
        non_finite += tl.where(finite, 0.0, 1.0)
        w = tl.load(w_ptr + i, mask=mask, other=0.0).to(tl.float32)
        if x_ptr is not None:
            x = tl.load(x_ptr + i, mask=i < written, other=0.0).to(tl.float32)
            update = decayed_update(w, scale * x, lr, decay)
        else:
            m = tl.load(m_ptr + i, mask=mask, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + i, mask=mask, other=0.0).to(tl.float32)
            g *= factor
            m, v = adamw_moments(m, v, g, alpha1, alpha2)
            m_correction = tl.load(step_in_ptr + M_CORRECTION)
            v_correction = tl.load(step_in_ptr + V_CORRECTION)
            update = adamw_update(w, m, v, lr, m_correction, v_correction, decay, eps)
        w_squares += w * w
        update_squares += update * update
    out = out_ptr + tl.program_id(0)
    tl.store(out, tl.sum(squares, 0))
    tl.store(out + PARTS, tl.max(largest, 0))
    tl.store(out + 2 * PARTS, tl.sum(non_finite, 0))
    tl.store(out + 3 * PARTS, tl.sum(w_squares, 0))
    tl.store(out + 4 * PARTS, tl.sum(update_squares, 0))


@contract("out[3,P]+ <- x[*]")
def tensor_stats(out: Tensor, x: Operand, acc: bool) -> None:
    """out = partial sums of x^2, largest |x|, non-finite counts, of Fp8's value, else
    rows; acc: with the old out.
    """
    scale = x.scale if isinstance(x, Fp8) and x.value is None else None
    x = full(x) if scale is None else x.rows
    P = out.shape[1]
    block = _block(x.numel(), 2048)
    _tensor_stats_kernel[(P,)](out, x, scale, x.numel(), ACC=acc, PARTS=P, BLOCK=block, num_warps=4)


@triton.jit
def _fp8_stats_kernel(
    out_ptr, x_ptr, n, ACC: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    largest = tl.zeros((BLOCK,), tl.float32)
    zero = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, n, PARTS * BLOCK):
        i = first + tl.arange(0, BLOCK)
        code = tl.load(x_ptr + i, mask=i < n, other=1) & 0x7F  # without the sign
        largest += tl.where(code == 0x7E, 1.0, 0.0)
        zero += tl.where(code == 0, 1.0, 0.0)
    out = out_ptr + tl.program_id(0)
    saturated = tl.sum(largest, 0)
    flushed = tl.sum(zero, 0)
    if ACC:
        saturated += tl.load(out)
        flushed += tl.load(out + PARTS)
    tl.store(out, saturated)
    tl.store(out + PARTS, flushed)


@contract("out[2,P]+ <- x[R,C]")
def fp8_stats(out: Tensor, x: Fp8, acc: bool) -> None:
    """out (+)= partial counts of an fp8 operand's elements: saturated ones (448, e4m3's
    largest number) and zeros.
    """
    P = out.shape[1]
    n = x.rows.numel()
    block = _block(n, 8192)
    _fp8_stats_kernel[(P,)](
        out, x.rows.view(torch.uint8), n, ACC=acc, PARTS=P, BLOCK=block, num_warps=4
    )


@contract("out[5,P] <- span.w[n] span.m[n] span.v[n] span.g[n] step.out[*] step.inp[8]")
def parameter_stats(out: Tensor, span: Span, step: Step, betas: Betas) -> None:
    """out = tensor_stats of g, then partial sums of w^2 and of the squared
    update: lr * (...) in adamw.py.

    The update is taken before w is rounded.  With fp32 masters, w is the bf16 weight: the decay and
    the ratio of update to weight use rounded weights.
    """
    w, m, v, _, g, _, lr_factor, decay = span
    n = w.numel()
    P = out.shape[1]
    alphas = (1.0 - betas.beta1, 1.0 - betas.beta2)
    block = _block(n, 1024)
    _parameter_stats_kernel[(P,)](
        out, w, m, v, None, g, step.out, step.inp, n, decay, lr_factor, 0.0, *alphas, betas.eps,
        PARTS=P, BLOCK=block, num_warps=4,
    )  # fmt: skip


@contract("out[5,P] <- c.w[n] c.x[n] c.g[n] step.out[*] step.inp[8]")
def muon_stats(out: Tensor, c: Matrices, step: Step) -> None:
    """out = parameter_stats of weights that Muon updates: lr * (scale * x + decay * w)."""
    n = c.w.numel()
    P = out.shape[1]
    _parameter_stats_kernel[(P,)](
        out, c.w, None, None, c.x, c.g, step.out, step.inp, n, c.decay, 1.0, c.scale, 0.0, 0.0, 0.0,
        PARTS=P, BLOCK=_block(n, 1024), num_warps=4,
    )  # fmt: skip


def stats_parts() -> int:
    """Return how many programs, and so partial results, a launcher has: eight for
    each of 132 multiprocessors.
    """
    return 2 if INTERPRET else 1056


def _block(n: int, on_gpu: int) -> int:
    return min(next_power_of_2(max(n // 2, 1)), 1 << 16) if INTERPRET else on_gpu
