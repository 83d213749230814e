"""The classifier's first product for Hopper, of bf16 or fp8 operands: p[R, Vp] and its row sums per
tile (see kernels/classifier.py).  In fp8, p is stored as rows and as columns.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gpt2_triton.kernels.device_math import LOG2E, exp_relative_tile, soft_cap
from gpt2_triton.kernels.e4m3 import P_SHIFT, nearest_e5m2, paired_columns, peek_exponent, to_e5m2
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
    Forms,
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
from gpt2_triton.kernels.tiles import halves, joined
from gpt2_triton.kernels.tuning import programs
from gpt2_triton.operands import Targets

CAPPED_PARTS = gl.constexpr(8)  # of a tile's columns, whose p and derivative registers hold
# of an accumulator
FP8_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N.value, 32]))


@gluon.jit
def capped_exponentials(z, head, n, V, CAP: gl.constexpr, FP8: gl.constexpr, PARTS: gl.constexpr):
    """Return p of a tile of products from column n on, times the cap's derivative, the sums of p's
    rows, and in fp8 those of what rounding adds.  head = (factor, reference, target).  Registers
    would not hold p and the derivative of a whole tile, so PARTS of its columns are taken in turn.
    """
    vector: gl.constexpr = head[1].type.layout
    if PARTS > 1:
        left, right = halves(z)
        half: gl.constexpr = z.shape[1] // 2
        left, sums, added = capped_exponentials(left, head, n, V, CAP, FP8, PARTS // 2)
        right, sums1, added1 = capped_exponentials(right, head, n + half, V, CAP, FP8, PARTS // 2)
        p = gl.convert_layout(joined(left, right), z.type.layout, assert_trivial=True)
        sums = sums + sums1
        added = added + added1
    else:
        rows: gl.constexpr = gl.SliceLayout(1, z.type.layout)
        reference = gl.convert_layout(head[1], rows, assert_trivial=True)
        target = gl.convert_layout(head[2], rows, assert_trivial=True)
        j = n + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, z.type.layout))
        logits, slope = soft_cap(z, head[0], CAP)
        p = exp_relative_tile(logits, reference, target, j)
        p = gl.where((j < V)[None, :], p, 0.0)
        sums = gl.convert_layout(gl.sum(p, 1), vector, assert_trivial=True)
        p *= slope
        added = sums
        if FP8:
            added = gl.sum(nearest_e5m2(p) - p, 1)
            added = gl.convert_layout(added, vector, assert_trivial=True)
    return p, sums, added


@gluon.jit
def classifier_partition(
    p_desc, columns_desc, p_scale_ptr, part_ptr, zt_ptr, peek_ptr, targets_ptr, lnf_scale_ptr,
    wte_scale_ptr, ring, p_buf, columns_buf, R, C, V, Vp, CAP: gl.constexpr,
):  # fmt: skip
    """Multiply tiles of logits; store p, times the cap's derivative, unless p_desc is None, and the
    row sums of p before that and before rounding.  If p is fp8, also store the row sums of the
    rounded p, or with a cap of what rounding adds.
    """
    LAYOUT: gl.constexpr = BF16_LAYOUT if lnf_scale_ptr is None else FP8_LAYOUT
    FP8: gl.constexpr = p_scale_ptr is not None  # p
    SHIFT: gl.constexpr = P_SHIFT if FP8 else 0
    factor = LOG2E
    if lnf_scale_ptr is not None:
        factor = LOG2E * unscale_of(lnf_scale_ptr, wte_scale_ptr)
    if FP8:
        gl.store(p_scale_ptr, 2.0**-SHIFT)
    step = 0
    for tile in range(gl.program_id(0), tiles(R, Vp, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, R, Vp, BLOCK_N)
        accs = (gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT),)
        accs = issue_mma(accs, ring, step, False, False, True)
        # while the first product runs
        r = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        reference = gl.load(zt_ptr + r, mask=r < R, other=0.0)
        if FP8:
            peek = gl.load(peek_ptr + r, mask=r < R, other=0.0)
            reference += peek_exponent(peek) + SHIFT
        target = gl.load(targets_ptr + r, mask=r < R, other=-1)
        z, step = mma_loop(accs, ring, step + 1, gl.cdiv(C, ring.a.shape[2]), False, True)
        if CAP == 0:
            j = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
            p = exp_relative_tile(z * factor, reference, target, j)
            if n + BLOCK_N > V:  # in all tiles this mask would be a sixth of the instructions
                p = gl.where((j < V)[None, :], p, 0.0)
            sums = gl.sum(p, 1)
        else:
            head = factor, reference, target
            p, sums, stored_sums = capped_exponentials(
                z, head, n, V, CAP * LOG2E, FP8, CAPPED_PARTS
            )
        tile_n = n // BLOCK_N
        gl.store(part_ptr + tile_n * R + r, sums * (2.0**SHIFT), mask=r < R)
        if p_desc is not None:
            if FP8:
                if CAP == 0:
                    stored_sums = gl.sum(nearest_e5m2(p), 1)
                row = gl.cdiv(Vp, BLOCK_N) + tile_n
                gl.store(part_ptr + row * R + r, stored_sums * (2.0**SHIFT), mask=r < R)
            tma.store_wait(0)
            if FP8:
                p_buf.store(to_e5m2(p))
                columns_buf.store(paired_columns(p, E5M2=True))
                fence_async_shared()
                tma_store(columns_desc, [n, m // 2], columns_buf)
            else:
                p_buf.store(p.to(gl.bfloat16))
                fence_async_shared()
            tma_store(p_desc, [m, n], p_buf)
    tma.store_wait(0)


@gluon.jit
def _classifier_kernel(
    p_desc, columns_desc, p_scale_ptr, part_ptr, lnf_desc, wte_desc, zt_ptr, peek_ptr, targets_ptr,
    lnf_scale_ptr, wte_scale_ptr, R, C, V, Vp, CAP: gl.constexpr,
):  # fmt: skip
    DEPTH: gl.constexpr = lnf_desc.block_type.shape[1]
    a_bufs = gl.allocate_shared_memory(lnf_desc.dtype, [STAGES, BLOCK_M, DEPTH], lnf_desc.layout)
    w_bufs = gl.allocate_shared_memory(wte_desc.dtype, [STAGES, BLOCK_N, DEPTH], wte_desc.layout)
    p_buf, columns_buf = None, None
    if p_desc is not None:
        p_buf = gl.allocate_shared_memory(p_desc.dtype, [BLOCK_M, BLOCK_N], p_desc.layout)
    if columns_desc is not None:
        columns_buf = gl.allocate_shared_memory(
            gl.int16, [BLOCK_N, BLOCK_M // 2], columns_desc.layout
        )
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES))
    # fmt: off
    gl.warp_specialize([
        (classifier_partition, (
            p_desc, columns_desc, p_scale_ptr, part_ptr, zt_ptr, peek_ptr, targets_ptr,
            lnf_scale_ptr, wte_scale_ptr, ring, p_buf, columns_buf, R, C, V, Vp, CAP,
        )),
        (load_partition, (lnf_desc, (wte_desc,), None, ring, None, R, Vp, C, BLOCK_N, True)),
    ], [1], [24])
    # fmt: on


def classifier_fwd(
    p: Forms,
    part: Tensor,
    lnf: Forms,
    wte: Forms,
    peek: Tensor | None,
    targets: Targets,
    V: int,
) -> None:
    """Write p[R, Vp] and part[tile, R], the sums of its rows in each tile.  fp8 operands have
    scales.  If p is fp8, it has a peek, a scale and columns [Vp, R] in pairs, R is a multiple of
    16, and part also has the rounded p's sums, or with a cap those of what rounding adds.
    """
    R, C = lnf.rows.shape
    Vp = wte.rows.shape[0]
    tile_k = TILE_K if lnf.scale is None else FP8_TILE_K
    _classifier_kernel[(programs(triton.cdiv(R, TILE_M) * triton.cdiv(Vp, TILE_N)),)](
        describe(p.rows, TILE_M, TILE_N), describe(p.columns, TILE_N, TILE_M // 2), p.scale, part,
        describe(lnf.rows, TILE_M, tile_k), describe(wte.rows, TILE_N, tile_k),
        targets.logits, peek, targets.ids, lnf.scale, wte.scale, R, C, V, Vp, CAP=targets.cap,
        **OPTIONS,
    )  # fmt: skip
