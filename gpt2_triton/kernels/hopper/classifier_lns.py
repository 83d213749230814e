"""An operand of the head's dW for Hopper: lns = rs * lnf in e5m2, transposed, with rows in
pairs as transpose.py has them.
"""

import triton
from torch import Tensor, int16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gpt2_triton.kernels.e4m3 import paired_columns
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
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8]))


@gluon.jit
def _classifier_lns_kernel(columns_desc, lnf_desc, rs_ptr, scale_ptr, R):
    lnf_buf = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], lnf_desc.layout)
    columns_buf = gl.allocate_shared_memory(gl.int16, [BLOCK, BLOCK // 2], columns_desc.layout)
    full = barriers(1)
    r = gl.program_id(0) * BLOCK
    c = gl.program_id(1) * BLOCK
    mbarrier.expect(full.index(0), lnf_desc.block_type.nbytes)
    tma_load(lnf_desc, [r, c], full.index(0), lnf_buf)
    rows = r + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))
    factor = gl.load(rs_ptr + rows, mask=rows < R, other=0.0) * gl.load(scale_ptr)
    wait_full(full, 0, 1)
    lns = lnf_buf.load(LAYOUT).to(gl.float32) * factor[:, None]
    columns_buf.store(paired_columns(lns, E5M2=True))
    fence_async_shared()
    tma_store(columns_desc, [c, r // 2], columns_buf)
    invalidate(full)
    tma.store_wait(0)


def classifier_lns(columns: Tensor, lnf: Tensor, rs: Tensor, scale: Tensor) -> None:
    """Write columns[C, R] = rs * lnf[R, C] * scale in e5m2, in pairs; R
    and C are multiples of 16.
    """
    R, C = lnf.shape
    _classifier_lns_kernel[(triton.cdiv(R, SIDE), triton.cdiv(C, SIDE))](
        describe(columns.view(int16), SIDE, SIDE // 2),
        describe(lnf, SIDE, SIDE),
        rs,
        scale,
        R,
        **OPTIONS,
    )
