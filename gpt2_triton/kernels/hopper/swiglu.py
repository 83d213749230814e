"""SwiGLU and its derivative in e4m3 for Hopper, as rows and as columns, with rows in pairs
as transpose.py has them.
"""

import triton
from torch import Tensor, int16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gpt2_triton.kernels.device_math import dswiglu, swiglu
from gpt2_triton.kernels.hopper.pipeline import (
    barriers,
    describe,
    invalidate,
    stage_forms,
    store_forms,
    tma_load,
    wait_full,
)

SIDE = 64  # of a block
BLOCK = gl.constexpr(SIDE)
OPTIONS = dict(num_warps=8)
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 2], [16, 8]))


@gluon.jit
def _swiglu_kernel(rows_desc, columns_desc, scale_ptr, amax_ptr, dout_desc, pre_desc, F):
    """Without dout, store swiglu of pre; with dout, the gradient of pre."""
    gates = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], pre_desc.layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], pre_desc.layout)
    full = barriers(1)
    r = gl.program_id(0) * BLOCK
    c = gl.program_id(1) * BLOCK
    blocks: gl.constexpr = 2 if dout_desc is None else 3
    scale = gl.load(scale_ptr)
    mbarrier.expect(full.index(0), blocks * pre_desc.block_type.nbytes)
    tma_load(pre_desc, [r, c], full.index(0), gates)
    tma_load(pre_desc, [r, F + c], full.index(0), values)
    if dout_desc is None:
        wait_full(full, 0, 1)
        h = swiglu(gates.load(LAYOUT).to(gl.float32), values.load(LAYOUT).to(gl.float32))
        staged = stage_forms(rows_desc, columns_desc, scale, amax_ptr, h)
        store_forms(rows_desc, columns_desc, staged, r, c)
    else:
        douts = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], dout_desc.layout)
        tma_load(dout_desc, [r, c], full.index(0), douts)
        wait_full(full, 0, 1)
        g = gates.load(LAYOUT).to(gl.float32)
        dg, du = dswiglu(douts.load(LAYOUT).to(gl.float32), g, values.load(LAYOUT).to(gl.float32))
        staged_dg = stage_forms(rows_desc, columns_desc, scale, amax_ptr, dg)
        staged_du = stage_forms(rows_desc, columns_desc, scale, amax_ptr, du)
        store_forms(rows_desc, columns_desc, staged_dg, r, c)
        store_forms(rows_desc, columns_desc, staged_du, r, F + c)
    invalidate(full)
    tma.store_wait(0)


def launch(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    amax: Tensor | None,
    pre: Tensor,
    dout: Tensor | None,
) -> None:
    """Write swiglu of pre[R, 2F], or with dout[R, F], pre's gradient, in
    e4m3 to rows and columns.
    """
    R = len(pre)
    F = pre.shape[1] // 2
    _swiglu_kernel[(triton.cdiv(R, SIDE), F // SIDE)](
        describe(rows, SIDE, SIDE), describe(columns.view(int16), SIDE, SIDE // 2), scale, amax,
        describe(dout, SIDE, SIDE), describe(pre, SIDE, SIDE), F, **OPTIONS,
    )  # fmt: skip
