"""The head's dX of fp8 operands for Hopper: dln[R, C] = rs * (p[R, Vp] @ wte[Vp, C]) +
ks * wte[target], over scales.

p is in e5m2, wte in e4m3.  Sums of 256 terms are added in fp32, from a ring of four stages.  The
ring leaves 32 KB for the tile that is stored, so it is stored in two halves.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gpt2_triton.kernels.device_math import scale_and_add_target
from gpt2_triton.kernels.hopper.fp8_matmul import (
    BLOCK_K,
    HALF,
    OPTIONS,
    ROWS_OF_GROUP,
    TILE_K,
    multiply_in_parts,
    unscale_of,
)
from gpt2_triton.kernels.hopper.mainloop import load_partition
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    TILE_M,
    TILE_N,
    Operands,
    barriers,
    corner,
    describe,
    quarters,
    tiles,
    tma_store,
)
from gpt2_triton.kernels.tuning import programs

STAGES = gl.constexpr(4)
DEEP = gl.constexpr(2)
STRIP = gl.constexpr(32)  # columns that are finished at once
STRIPS = gl.constexpr(4)  # that shared memory holds for each warpgroup: half of a tile


@gluon.jit
def finish_strip(acc, head, scales, m, n, R, C):
    """Return a strip that begins at row m, column n with the factors head = (rs, ks,
    targets, wte) applied, in bf16.
    """
    rows = m + gl.arange(0, ROWS_OF_GROUP, layout=gl.SliceLayout(1, acc.type.layout))
    cols = n + gl.arange(0, STRIP, layout=gl.SliceLayout(0, acc.type.layout))
    rs = gl.load(head[0] + rows, mask=rows < R, other=0.0) * unscale_of(scales[0], scales[1])
    ks = gl.load(head[1] + rows, mask=rows < R, other=0.0) / gl.load(scales[1])
    target = gl.load(head[2] + rows, mask=rows < R, other=-1).to(gl.int64)
    return scale_and_add_target(acc, rs, ks, target, head[3], cols, C).to(gl.bfloat16)


@gluon.jit
def dx_partition(dln_desc, scales, head, ring, c_bufs, R, C, Vp, GROUP: gl.constexpr):
    """Multiply a warpgroup's part of the tiles, finish and store it strip by strip."""
    step = 0
    for tile in range(gl.program_id(0), tiles(R, C, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, R, C, BLOCK_N)
        m += ROWS_OF_GROUP * GROUP
        left, right, step = multiply_in_parts(
            ring, step, gl.cdiv(Vp, BLOCK_K), n + HALF < C, GROUP, DEEP
        )
        sums = left, right
        for half in gl.static_range(2):
            strips = quarters(sums[half])
            tma.store_wait(0)
            for s in gl.static_range(STRIPS):
                strip = finish_strip(strips[s], head, scales, m, n + half * HALF + s * STRIP, R, C)
                c_bufs.index(STRIPS * GROUP + s).store(strip)
            fence_async_shared()
            for s in gl.static_range(STRIPS):
                tma_store(
                    dln_desc, [m, n + half * HALF + s * STRIP], c_bufs.index(STRIPS * GROUP + s)
                )
    tma.store_wait(0)


@gluon.jit
def _classifier_dx_kernel(
    dln_desc, p_desc, columns_desc, p_scale_ptr, wte_scale_ptr, rs_ptr, ks_ptr, targets_ptr,
    wte_ptr, R, C, Vp,
):  # fmt: skip
    p_bufs = gl.allocate_shared_memory(p_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], p_desc.layout)
    w_bufs = gl.allocate_shared_memory(
        columns_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], columns_desc.layout
    )
    c_bufs = gl.allocate_shared_memory(
        gl.bfloat16, [2 * STRIPS, ROWS_OF_GROUP, STRIP], dln_desc.layout
    )
    ring = Operands(p_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES, 2))
    scales = (p_scale_ptr, wte_scale_ptr)
    head = (rs_ptr, ks_ptr, targets_ptr, wte_ptr)
    # fmt: off
    gl.warp_specialize([
        (dx_partition, (dln_desc, scales, head, ring, c_bufs, R, C, Vp, 0)),
        (dx_partition, (dln_desc, scales, head, ring, c_bufs, R, C, Vp, 1)),
        (load_partition, (p_desc, (columns_desc,), None, ring, None, R, C, Vp, BLOCK_N, True)),
    ], [4, 1], [240, 24])
    # fmt: on


def classifier_dx(
    dln: Tensor, p: Tensor, p_scale: Tensor, columns: Tensor, wte_scale: Tensor, wte: Tensor,
    rs: Tensor, ks: Tensor, targets: Tensor,
) -> None:  # fmt: skip
    """Write dln, bf16 [R, C]; p is e5m2 [R, Vp], wte e4m3 [Vp, C], columns its
    transpose, rs and ks fp32 [R].
    """
    (R, C), Vp = dln.shape, p.shape[1]
    _classifier_dx_kernel[(programs(triton.cdiv(R, TILE_M) * triton.cdiv(C, TILE_N)),)](
        describe(dln, ROWS_OF_GROUP.value, STRIP.value), describe(p, TILE_M, TILE_K),
        describe(columns, TILE_N, TILE_K), p_scale, wte_scale, rs, ks, targets, wte, R, C, Vp,
        **OPTIONS,
    )  # fmt: skip
