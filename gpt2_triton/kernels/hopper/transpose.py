"""Transposition of e4m3 for Hopper, with the rows of each 16 in pairs:
position 2g + h holds row g + 8h.

Shared memory is read in the layout of a tensor core's operand: a thread holds rows g and g + 8.
A number of 16 bits packs the two bytes, and stmatrix can store it transposed.  The kernel
reaches 92% of a copy's speed.
"""

import triton
from torch import Tensor, int16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

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


@gluon.jit
def pairs(x):
    """Return e4m3 [R, C] as int16 [R / 2, C]: rows 16a + g and 16a + 8 + g become
    the two bytes of row 8a + g.
    """
    r: gl.constexpr = x.shape[0]
    c: gl.constexpr = x.shape[1]
    u = x.to(gl.uint8, bitcast=True)
    low, high = gl.split(gl.permute(gl.reshape(u, (r // 16, 2, 8, c)), (0, 2, 3, 1)))
    return gl.reshape(low.to(gl.int16) | (high.to(gl.int16) << 8), (r // 2, c))


@gluon.jit
def _transpose_kernel(out_desc, x_desc):
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    x_buf = gl.allocate_shared_memory(gl.float8e4nv, [BLOCK, BLOCK], x_desc.layout)
    out_buf = gl.allocate_shared_memory(gl.int16, [BLOCK, BLOCK // 2], out_desc.layout)
    full = barriers(1)
    r = gl.program_id(0) * BLOCK
    c = gl.program_id(1) * BLOCK
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    tma_load(x_desc, [r, c], full.index(0), x_buf)
    wait_full(full, 0, 1)
    out_buf.permute((1, 0)).store(pairs(x_buf.load(layout)))
    fence_async_shared()
    tma_store(out_desc, [c, r // 2], out_buf)
    invalidate(full)
    tma.store_wait(0)


def transpose(out: Tensor, x: Tensor) -> None:
    """Write out[C, R] = x[R, C] transposed, in pairs; R and C are multiples of 16."""
    R, C = x.shape
    _transpose_kernel[(triton.cdiv(R, SIDE), triton.cdiv(C, SIDE))](
        describe(out.view(int16), SIDE, SIDE // 2), describe(x, SIDE, SIDE), num_warps=8
    )
