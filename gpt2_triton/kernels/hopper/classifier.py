"""The head's first product for Hopper: p[R, Vp] and the row sums of each tile, as classifier.py describes."""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gpt2_triton.kernels.device_math import exp_relative
from gpt2_triton.kernels.hopper.matmul import load
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    LAYOUT,
    OPTIONS,
    STAGES,
    TILE_K,
    TILE_M,
    TILE_N,
    barriers,
    corner,
    describe,
    multiply,
    multiply_rest,
    tiles,
    tma_store,
)
from gpt2_triton.kernels.tuning import num_sms


@gluon.jit
def _classifier_compute(p_desc, part_ptr, zt_ptr, targets_ptr, a_bufs, w_bufs, c_buf, full, empty, R, C, V, Vp):
    step = 0
    for tile in range(gl.program_id(0), tiles(R, Vp, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, R, Vp, BLOCK_N)
        z = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        z = multiply(z, step, a_bufs, w_bufs, full, False, False, True, STAGES)
        r = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        j = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        zt = gl.load(zt_ptr + r, mask=r < R, other=0.0)
        target = gl.load(targets_ptr + r, mask=r < R, other=-1)
        steps = gl.cdiv(C, BLOCK_K)
        z, step = multiply_rest(z, step + 1, steps, a_bufs, w_bufs, full, empty, False, True, STAGES)
        p = exp_relative(z, zt[:, None], (j < V)[None, :] & (j[None, :] != target[:, None]))
        gl.store(part_ptr + n // BLOCK_N * R + r, gl.sum(p, 1), mask=r < R)
        if p_desc is not None:
            tma.store_wait(0)
            c_buf.store(p.to(gl.bfloat16))
            fence_async_shared()
            tma_store(p_desc, [m, n], c_buf)
    tma.store_wait(0)


@gluon.jit
def _classifier_kernel(p_desc, part_ptr, lnf_desc, wte_desc, zt_ptr, targets_ptr, R, C, V, Vp):
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], lnf_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], wte_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N], lnf_desc.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    gl.warp_specialize(
        [
            (
                _classifier_compute,
                (p_desc, part_ptr, zt_ptr, targets_ptr, a_bufs, w_bufs, c_buf, full, empty, R, C, V, Vp),
            ),
            (load, (lnf_desc, wte_desc, None, a_bufs, w_bufs, c_buf, full, empty, None, None, R, Vp, C, True)),
        ],
        [1],
        [24],
    )


def classifier_fwd(
    p: Tensor | None, part: Tensor, lnf: Tensor, wte: Tensor, zt: Tensor, targets: Tensor, V: int
) -> None:
    """p[R, Vp] and part[tile, R], the sums of its rows in each tile of BLOCK_N columns."""
    (R, C), Vp = lnf.shape, wte.shape[0]
    programs = min(num_sms(), triton.cdiv(R, TILE_M) * triton.cdiv(Vp, TILE_N))
    _classifier_kernel[(programs,)](
        describe(p, TILE_M, TILE_N),
        part,
        describe(lnf, TILE_M, TILE_K),
        describe(wte, TILE_N, TILE_K),
        zt,
        targets,
        R,
        C,
        V,
        Vp,
        **OPTIONS,
    )
