"""Weights in e4m3 for Hopper, as rows and as columns, from one reading of bf16.

TMA stores a block of rows from shared memory.  The block is read again in a layout that gives a thread rows 2g and
2g + 1.  A number of 16 bits packs the two bytes, and stmatrix can store it transposed.
"""

import triton
from torch import Tensor, int16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gpt2_triton.kernels.e4m3 import quantise
from gpt2_triton.kernels.hopper.pipeline import barriers, describe, invalidate, tma_load, tma_store, wait_full

SIDE = 128  # of a block
BLOCK = gl.constexpr(SIDE)
OPTIONS = dict(num_warps=8)
LOADED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
TURNED = gl.constexpr(  # like a tensor core's result, but a thread holds rows 2g and 2g + 1 instead of g and g + 8
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 8], [0, 16], [0, 32], [0, 64]], [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        [[16, 0], [32, 0], [64, 0]], [], [SIDE, SIDE],
    )
)  # fmt: skip


@gluon.jit
def _cast_weight_kernel(rows_desc, columns_desc, x_desc, scale_ptr, amax_ptr):
    """Cast one block; TMA loads 0 past the edges and stores nothing there."""
    x_buf = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], x_desc.layout)
    r_buf = gl.allocate_shared_memory(gl.float8e4nv, [BLOCK, BLOCK], rows_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.int16, [BLOCK, BLOCK // 2], columns_desc.layout)
    full = barriers(1)
    r = gl.program_id(0) * BLOCK
    c = gl.program_id(1) * BLOCK
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    tma_load(x_desc, [r, c], full.index(0), x_buf)
    wait_full(full, 0, 1)
    r_buf.store(quantise(x_buf.load(LOADED).to(gl.float32), scale_ptr, amax_ptr))
    fence_async_shared()
    tma_store(rows_desc, [r, c], r_buf)
    byte = r_buf.load(TURNED).to(gl.uint8, bitcast=True)
    low, high = gl.split(gl.permute(gl.reshape(byte, (BLOCK // 2, 2, BLOCK)), (0, 2, 1)))
    c_buf.permute((1, 0)).store(low.to(gl.int16) | (high.to(gl.int16) << 8))
    fence_async_shared()
    tma_store(columns_desc, [c, r // 2], c_buf)
    invalidate(full)
    tma.store_wait(0)


def cast_weight(rows: Tensor, columns: Tensor, x: Tensor, scale: Tensor, amax: Tensor | None) -> None:
    """Write x[R, C], bf16, times scale, fp32 [1], in e4m3 to rows [R, C] and columns [C, R].  Record the amax in int32
    [AMAX_CELLS] unless amax is None.  R and C are multiples of 16.
    """
    R, C = x.shape
    _cast_weight_kernel[(triton.cdiv(R, SIDE), triton.cdiv(C, SIDE))](
        describe(rows, SIDE, SIDE), describe(columns.view(int16), SIDE, SIDE // 2), describe(x, SIDE, SIDE),
        scale, amax, **OPTIONS,
    )  # fmt: skip
