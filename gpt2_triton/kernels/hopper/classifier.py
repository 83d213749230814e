"""The classifier's first product for Hopper, of bf16 or fp8 operands: p[R, Vp] and its row sums per tile (see
kernels/classifier.py).
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gpt2_triton.kernels.device_math import LOG2E, exp_relative_tile
from gpt2_triton.kernels.hopper.fp8_matmul import TILE_K as FP8_TILE_K
from gpt2_triton.kernels.hopper.fp8_matmul import unscale_of
from gpt2_triton.kernels.hopper.mainloop import load_partition
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    OPTIONS,
    STAGES,
    TILE_K,
    TILE_M,
    TILE_N,
    Operands,
    barriers,
    corner,
    describe,
    issue_mma,
    mma_loop,
    tiles,
    tma_store,
)
from gpt2_triton.kernels.hopper.pipeline import LAYOUT as BF16_LAYOUT
from gpt2_triton.kernels.tuning import programs

FP8_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N.value, 32]))  # of an accumulator
P_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([TILE_M, TILE_N], gl.bfloat16))  # in shared memory


@gluon.jit
def classifier_partition(
    p_desc, part_ptr, zt_ptr, targets_ptr, lnf_scale_ptr, wte_scale_ptr, ring, c_buf, R, C, V, Vp
):  # fmt: skip
    """Multiply tiles of logits; store p, unless p_desc is None, and the row sums of p before rounding."""
    LAYOUT: gl.constexpr = BF16_LAYOUT if lnf_scale_ptr is None else FP8_LAYOUT
    factor = LOG2E
    if lnf_scale_ptr is not None:
        factor = LOG2E * unscale_of(lnf_scale_ptr, wte_scale_ptr)
    step = 0
    for tile in range(gl.program_id(0), tiles(R, Vp, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, R, Vp, BLOCK_N)
        accs = (gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT),)
        accs = issue_mma(accs, ring, step, False, False, True)
        # while the first product runs
        r = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        j = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        zt = gl.load(zt_ptr + r, mask=r < R, other=0.0)
        target = gl.load(targets_ptr + r, mask=r < R, other=-1)
        z, step = mma_loop(accs, ring, step + 1, gl.cdiv(C, ring.a.shape[2]), False, True)
        p = exp_relative_tile(z, factor, zt, target, j, V)
        gl.store(part_ptr + n // BLOCK_N * R + r, gl.sum(p, 1), mask=r < R)
        if p_desc is not None:
            tma.store_wait(0)
            c_buf.store(p.to(gl.bfloat16))
            fence_async_shared()
            tma_store(p_desc, [m, n], c_buf)
    tma.store_wait(0)


@gluon.jit
def _classifier_kernel(
    p_desc, part_ptr, lnf_desc, wte_desc, zt_ptr, targets_ptr, lnf_scale_ptr, wte_scale_ptr, R, C, V, Vp
):  # fmt: skip
    DEPTH: gl.constexpr = lnf_desc.block_type.shape[1]
    a_bufs = gl.allocate_shared_memory(lnf_desc.dtype, [STAGES, BLOCK_M, DEPTH], lnf_desc.layout)
    w_bufs = gl.allocate_shared_memory(wte_desc.dtype, [STAGES, BLOCK_N, DEPTH], wte_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N], P_LAYOUT)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES))
    # fmt: off
    gl.warp_specialize([
        (classifier_partition, (p_desc, part_ptr, zt_ptr, targets_ptr, lnf_scale_ptr, wte_scale_ptr, ring, c_buf,
                                R, C, V, Vp)),
        (load_partition, (lnf_desc, (wte_desc,), None, ring, None, R, Vp, C, BLOCK_N, True)),
    ], [1], [24])
    # fmt: on


def classifier_fwd(
    p: Tensor | None, part: Tensor, lnf: Tensor, lnf_scale: Tensor | None, wte: Tensor, wte_scale: Tensor | None,
    zt: Tensor, targets: Tensor, V: int,
) -> None:  # fmt: skip
    """Write p[R, Vp] and part[tile, R], the sums of its rows in each tile; fp8 operands have scales."""
    (R, C), Vp = lnf.shape, wte.shape[0]
    tile_k = TILE_K if lnf_scale is None else FP8_TILE_K
    _classifier_kernel[(programs(triton.cdiv(R, TILE_M) * triton.cdiv(Vp, TILE_N)),)](
        describe(p, TILE_M, TILE_N), part, describe(lnf, TILE_M, tile_k), describe(wte, TILE_N, tile_k),
        zt, targets, lnf_scale, wte_scale, R, C, V, Vp, **OPTIONS,
    )  # fmt: skip
