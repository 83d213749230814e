"""A layer's four weights in e4m3 for Hopper, as rows and as columns, in one launch
and from one reading of bf16.

A program casts one block.  TMA stores the block's rows from shared memory.  They are read again in
a layout that gives a thread rows 2g and 2g + 1.  A number of 16 bits packs the two bytes, and
stmatrix can store it transposed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor, int16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gpt2_triton.kernels.e4m3 import quantise
from gpt2_triton.kernels.hopper.pipeline import (
    barriers,
    describe,
    invalidate,
    tma_load,
    tma_store,
    wait_full,
)

SIDE = 128  # of a block
BLOCK = gl.constexpr(SIDE)
OPTIONS = dict(num_warps=8)
LOADED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
# like a tensor core's result, but a thread holds rows 2g and 2g + 1 instead of g and g + 8
TURNED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]], [[16, 0], [32, 0], [64, 0]], [], [SIDE, SIDE],
    )
)  # fmt: skip


class Weight(NamedTuple):
    """A weight's descriptors, its scale and cells, and its blocks in a row."""

    rows: Any
    columns: Any
    x: Any
    scale: Any
    amax: Any
    across: Any


@gluon.jit
def _cast_block(w, t, bufs):
    """Cast block t of a weight; TMA loads 0 past the edges and stores nothing there."""
    x_buf, r_buf, c_buf, full = bufs
    r = t // w.across * BLOCK
    c = t % w.across * BLOCK
    mbarrier.expect(full.index(0), w.x.block_type.nbytes)
    tma_load(w.x, [r, c], full.index(0), x_buf)
    wait_full(full, 0, 1)
    r_buf.store(quantise(x_buf.load(LOADED).to(gl.float32), w.scale, w.amax))
    fence_async_shared()
    tma_store(w.rows, [r, c], r_buf)
    byte = r_buf.load(TURNED).to(gl.uint8, bitcast=True)
    low, high = gl.split(gl.permute(gl.reshape(byte, (BLOCK // 2, 2, BLOCK)), (0, 2, 1)))
    c_buf.permute((1, 0)).store(low.to(gl.int16) | (high.to(gl.int16) << 8))
    fence_async_shared()
    tma_store(w.columns, [c, r // 2], c_buf)


# each scale is one number: alignment gains nothing
@gluon.jit(do_not_specialize_on_alignment=[f"{p}_{i}" for p in ("scale", "amax") for i in range(4)])
def _cast_weights_kernel(
    rows_0, columns_0, x_0, scale_0, amax_0, across_0, end_0, rows_1, columns_1, x_1, scale_1,
    amax_1, across_1, end_1, rows_2, columns_2, x_2, scale_2, amax_2, across_2, end_2, rows_3,
    columns_3, x_3, scale_3, amax_3, across_3, end_3,
):  # fmt: skip
    """`end`: the number of blocks of a weight and of those before it."""
    x_buf = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], x_0.layout)
    r_buf = gl.allocate_shared_memory(gl.float8e4nv, [BLOCK, BLOCK], rows_0.layout)
    c_buf = gl.allocate_shared_memory(gl.int16, [BLOCK, BLOCK // 2], columns_0.layout)
    full = barriers(1)
    bufs = (x_buf, r_buf, c_buf, full)
    t = gl.program_id(0)
    # fmt: off
    if t < end_0:
        _cast_block(Weight(rows_0, columns_0, x_0, scale_0, amax_0, across_0), t, bufs)
    elif t < end_1:
        _cast_block(Weight(rows_1, columns_1, x_1, scale_1, amax_1, across_1), t - end_0, bufs)
    elif t < end_2:
        _cast_block(Weight(rows_2, columns_2, x_2, scale_2, amax_2, across_2), t - end_1, bufs)
    else:
        _cast_block(Weight(rows_3, columns_3, x_3, scale_3, amax_3, across_3), t - end_2, bufs)
    # fmt: on
    invalidate(full)
    tma.store_wait(0)


def cast_weights(weights: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]) -> None:
    """Write each x[R, C], bf16, times its scale, fp32 [1], in e4m3 to rows [R, C] and columns [C,
    R].  Record the amax in int32 [AMAX_CELLS] unless amax is None.  `weights` has one to four
    (rows, columns, x, scale, amax); sizes are multiples of 16.
    """
    arguments, blocks = [], 0
    for i in range(4):  # a weight that is not there has no blocks
        rows, columns, x, scale, amax = weights[min(i, len(weights) - 1)]
        down, across = (triton.cdiv(size, SIDE) for size in x.shape)
        blocks += down * across if i < len(weights) else 0
        described = (
            describe(rows, SIDE, SIDE),
            describe(columns.view(int16), SIDE, SIDE // 2),
            describe(x, SIDE, SIDE),
        )
        arguments += [*described, scale, amax, across, blocks]
    _cast_weights_kernel[(blocks,)](*arguments, **OPTIONS)
