"""fp8 operands (e4m3) of products: their rounding, their scales, and
the launches that only fp8 has.

An operand is stored as q = e4m3(x * scale), with one scale for a tensor, a power of two.  The
kernel that writes the tensor also records its largest |x|, amax; roll_scales turns the maxima of
the last 16 steps into the scales of the next step.  So a scale costs no pass over its tensor.  A
scale is fixed during a step: all ranks and micro-steps use the same.

wgmma, Hopper's matrix instruction, takes 8-bit operands only K-major: the summed dimension is
contiguous.  A weight gradient sums over tokens, so its operands are also stored transposed, as
`columns`.  There tokens g and g + 8 of each 16 are a pair, as Hopper's stmatrix writes them:
position 2g + h holds token g + 8h.  A product does not depend on an order that both operands share.
The columns of weights have no pairs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels import hopper
from gpt2_triton.kernels.blocks import Blocks, describe, store_block
from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.e4m3 import (
    paired_columns,
    quantise,
    record_bits,
    row_maxima,
    to_e4m3,
    token_at,
)
from gpt2_triton.kernels.hopper import cast as hopper_cast
from gpt2_triton.kernels.hopper import transpose as hopper_transpose
from gpt2_triton.kernels.step_io import APPLY
from gpt2_triton.kernels.tuning import INTERPRET, next_power_of_2
from gpt2_triton.operands import Fp8, Operand


def full(operand: Operand) -> Tensor:
    """Return the operand in bf16; an Fp8 must have `value`."""
    if not isinstance(operand, Fp8):
        return operand
    assert operand.value is not None
    return operand.value


def stored(operand: Operand | None) -> tuple[Any, Tensor | None, Tensor | None]:
    """Return the tensor that a kernel writes, and for fp8 its scale and the cells of its amax."""
    if isinstance(operand, Fp8):
        return operand.rows, operand.scale, operand.amax
    return operand, None, None


def in_fp8(operand: Operand) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return what is stored of an operand in fp8; three None for another operand."""
    return stored(operand if isinstance(operand, Fp8) else None)


# ---- device functions ----


@triton.jit
def store_columns(columns_desc, scale_ptr, b, h, t, value):
    """Store `value`, in e4m3 and transposed, at the rows from t on of head h in sequence b."""
    columns = paired_columns(value * tl.load(scale_ptr))
    store_block(columns_desc, [h, 0, b, t // 2], columns)


@triton.jit
def store_heads(desc, columns_desc, scale_ptr, amax_ptr, b, h, t, value):
    """Store `value` at the rows from t on of head h in sequence b: in e4m3 if there is a scale, and
    transposed too if there is a columns_desc.  `value` is 0 past the sequence's end.
    """
    if columns_desc is not None:
        store_columns(columns_desc, scale_ptr, b, h, t, value)
    if scale_ptr is not None:
        value = quantise(value, scale_ptr, amax_ptr)
    store_block(desc, [b, h, t, 0], value)


# ---- kernels ----


@triton.jit
def _roll_scales_kernel(
    scale_ptr, history_ptr, amax_ptr, step_out_ptr, CELLS: tl.constexpr, STEPS: tl.constexpr
):
    slot = tl.program_id(0)
    i = tl.arange(0, CELLS)
    amax = tl.max(tl.load(amax_ptr + slot * CELLS + i), 0).to(tl.float32, bitcast=True)
    tl.store(amax_ptr + slot * CELLS + i, tl.zeros((CELLS,), tl.int32))
    if (tl.load(step_out_ptr + APPLY) == 1.0) & (amax < float("inf")):  # false for NaN
        s = tl.arange(0, STEPS)
        history = tl.load(history_ptr + slot * STEPS + s - 1, mask=s > 0, other=0.0)
        history = tl.where(s == 0, amax, history)
        tl.store(history_ptr + slot * STEPS + s, history)
        most = tl.max(history, 0)
        # 2^floor(log2(224 / most)), from exponents: 224 = 448 / 2, as a tensor may
        # double in a step; 224 = 1.75 * 2^7
        bits = most.to(tl.uint32, bitcast=True)
        above = tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
        exponent = tl.minimum(7 - ((bits >> 23).to(tl.int32) - 127) - above, 100)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        tl.store(scale_ptr + slot, scale, mask=most > 0.0)


@triton.jit
def _check_amax_kernel(squares_ptr, amax_ptr, N, BLOCK: tl.constexpr):
    bits = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, N, BLOCK):
        i = first + tl.arange(0, BLOCK)
        bits = tl.maximum(bits, tl.load(amax_ptr + i, mask=i < N, other=0))
    if tl.max(bits, 0) >= 0x7F800000:  # the bits of infinity; NaN's bits are larger
        tl.store(squares_ptr, float("nan"))


@triton.jit
def _cast_kernel(
    out_ptr, x_ptr, scale_ptr, amax_ptr, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    amax_bits = tl.zeros((BLOCK_R,), tl.int32)
    scale = tl.load(scale_ptr)
    for first in range(0, C, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mask = (r < R)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + r.to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        if amax_ptr is not None:
            amax_bits = row_maxima(amax_bits, x)
        tl.store(out_ptr + r.to(tl.int64)[:, None] * C + c[None, :], to_e4m3(x * scale), mask=mask)
    if amax_ptr is not None:
        record_bits(amax_ptr, amax_bits)


@triton.jit
def _transpose_kernel(
    out_ptr, x_ptr, R, C, PAIRS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    p = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = p
    if PAIRS:
        r = token_at(p)
    mask = (r < R)[:, None] & (c < C)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0)
    out_mask = (c < C)[:, None] & (p < R)[None, :]
    tl.store(out_ptr + c[:, None] * R + p[None, :], tl.trans(x), mask=out_mask)


# ---- launchers ----


def block(n: int, most: int) -> int:
    """Return the size of a block that runs along n elements: on a GPU at most `most`."""
    return min(next_power_of_2(n), 1024 if INTERPRET else most)


def transpose(out: Tensor, x: Tensor, pairs: bool) -> None:
    """Write out[C, R] = x[R, C] transposed; with `pairs`, R is a multiple of
    16 and tokens are in pairs.
    """
    R, C = x.shape
    if pairs and hopper.takes("transpose", R, C, "fp8"):
        return hopper_transpose.transpose(out, x)
    block_r = block(R, 128)
    block_c = block(C, 128)
    grid = (triton.cdiv(R, block_r), triton.cdiv(C, block_c))
    _transpose_kernel[grid](
        out.view(torch.uint8),
        x.view(torch.uint8),
        R,
        C,
        PAIRS=pairs,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=8,
    )


def describe_heads(operand: Operand, shape: Sequence[int], HS: int, tokens: int) -> Blocks | None:
    """Describe columns [heads*HS, B*T] as pairs [heads, HS, B, T/2];
    None if they are not written.
    """
    if not (isinstance(operand, Fp8) and operand.transposed):
        return None
    B, _, T = shape
    pairs = operand.columns.view(torch.int16).view(-1, HS, B, T // 2)
    return describe(pairs, 1, next_power_of_2(HS), 1, tokens // 2)


@contract("x8[R,C] <- x8.value[R,C]")
def cast_operand(x8: Fp8) -> None:
    """Cast an operand's value to its rows and record the amax; a weight (x8.transposed) also
    gets columns, without pairs.
    """
    x = full(x8)
    R, C = x.shape
    if x8.transposed and hopper.takes("cast_weight", R, C, "fp8"):
        return hopper_cast.cast_weights([(x8.rows, x8.columns, x, x8.scale, x8.amax)])
    block_r = block(R, 4)
    block_c = block(C, 256)
    _cast_kernel[(triton.cdiv(R, block_r),)](
        x8.rows, x, x8.scale, x8.amax, R, C, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4
    )
    if x8.transposed:
        transpose(x8.columns, x8.rows, pairs=False)


@contract(
    "a8[A,B] b8[D,E] c8[F,G] d8[H,I] <- a8.value[A,B] b8.value[D,E] c8.value[F,G] d8.value[H,I]"
)
def cast_weights(a8: Fp8, b8: Fp8, c8: Fp8, d8: Fp8) -> None:
    """Cast a layer's four weights, as cast_operand does; on Hopper in one launch."""
    weights = (a8, b8, c8, d8)
    if all(hopper.takes("cast_weight", *x8.shape, "fp8") for x8 in weights):
        return hopper_cast.cast_weights(
            [(x8.rows, x8.columns, full(x8), x8.scale, x8.amax) for x8 in weights]
        )
    for x8 in weights:
        cast_operand(x8)


@contract("squares[1]+ <- amax[Q,P]")
def check_amax(squares: Tensor, amax: Tensor) -> None:
    """Set squares to NaN if an amax is not finite: e4m3 has no infinity, so
    losses may be finite then.
    """
    _check_amax_kernel[(1,)](squares, amax, amax.numel(), BLOCK=1024, num_warps=4)


@contract("scale[A]+ history[A,H]+ amax[Q,P]+ <- step_out[*]")
def roll_scales(scale: Tensor, history: Tensor, amax: Tensor, step_out: Tensor) -> None:
    """Move each tensor's amax into its history, set its scale for the
    next step, and clear its cells.

    The scale is the largest power of two that keeps twice the history's maximum at or below 448.  A
    skipped step (step_out[APPLY] 0) changes neither scale nor history; neither does an amax that is
    not finite.  A history of zeros does not change the scale.
    """
    Q, steps = history.shape
    _roll_scales_kernel[(Q,)](
        scale, history, amax, step_out, CELLS=amax.shape[1], STEPS=steps, num_warps=1
    )
