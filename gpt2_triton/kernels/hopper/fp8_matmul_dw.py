"""Weight gradients of fp8 operands for Hopper: dw[N, K] (+)= dout[N, R] @ inp[K, R].T / scales, in fp32.

The sums of each 128 tokens are added in fp32, by the warpgroups of fp8_matmul.py.  Of operands in e5m2, the head's,
256 tokens: e5m2 itself rounds more than the tensor cores' sums.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gpt2_triton.kernels.dw_split import TileSplit
from gpt2_triton.kernels.hopper.fp8_matmul import (
    BLOCK_K,
    HALF,
    OPTIONS,
    ROWS_OF_GROUP,
    TILE_K,
    multiply_in_parts,
    unscale_of,
)
from gpt2_triton.kernels.hopper.matmul_dw import STAGES, destination, dw_load_partition, store_quarter
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    GROUP_M,
    TILE_M,
    TILE_N,
    Operands,
    barriers,
    describe,
    quarters,
)
from gpt2_triton.kernels.tiles import split_item, tile_corner
from gpt2_triton.kernels.tuning import programs


@gluon.jit
def fp8_dw_partition(
    out_ptr, part_ptr, scales, ring, N, K, work, GROUP: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Multiply a warpgroup's part of the items; store tiles to out, partial sums to part."""
    whole_tiles, split_tiles, items, steps, part_steps = work
    TURNED: gl.constexpr = ROWS == BLOCK_N
    DEEP: gl.constexpr = 2 if ring.a.dtype == gl.float8e5 else 1
    unscale = unscale_of(scales[0], scales[1])
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, _, count, slot = split_item(item, whole_tiles, split_tiles, steps, part_steps)
        n, k = tile_corner(tile, N, K, ROWS, COLUMNS, GROUP_M)
        whole = n + HALF < N if TURNED else k + HALF < K
        left, right, step = multiply_in_parts(ring, step, count, whole, GROUP, DEEP)
        ptr, stride, height, width = destination(out_ptr, part_ptr, n, k, N, K, slot, ROWS, COLUMNS)
        if TURNED:
            ptr += ROWS_OF_GROUP * GROUP
            width -= ROWS_OF_GROUP * GROUP
        else:
            ptr += ROWS_OF_GROUP * GROUP * stride
            height -= ROWS_OF_GROUP * GROUP
        parts = quarters(left) + quarters(right)
        for q in gl.static_range(8):
            store_quarter(
                parts[q] * unscale, q * (BLOCK_N // 8), ptr, stride, height, width, slot, TURNED, ACC
            )  # fmt: skip


@gluon.jit
def _fp8_dw_kernel(
    out_ptr, part_ptr, a_desc, w_desc, dout_scale_ptr, inp_scale_ptr, N, K,
    whole_tiles, split_tiles, items, steps, part_steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES, 2))
    work = (whole_tiles, split_tiles, items, steps, part_steps)
    scales = (dout_scale_ptr, inp_scale_ptr)
    # fmt: off
    gl.warp_specialize([
        (fp8_dw_partition, (out_ptr, part_ptr, scales, ring, N, K, work, 0, ROWS, COLUMNS, ACC)),
        (fp8_dw_partition, (out_ptr, part_ptr, scales, ring, N, K, work, 1, ROWS, COLUMNS, ACC)),
        (dw_load_partition, (a_desc, w_desc, ring, N, K, work, ROWS, COLUMNS, True)),
    ], [4, 1], [240, 24])
    # fmt: on


def matmul_dw(
    dw: Tensor, scratch: Tensor, dout: Tensor, inp: Tensor, dout_scale: Tensor, inp_scale: Tensor, split: TileSplit,
    acc: bool,
) -> None:  # fmt: skip
    """Write the whole tiles of dw (+)= dout[N, R] @ inp[K, R].T / scales, and partial sums of the others to scratch."""
    N, K = dw.shape
    a, w = (dout, inp) if split.rows == TILE_M else (inp, dout)
    _fp8_dw_kernel[(programs(split.items),)](
        dw, scratch, describe(a, TILE_M, TILE_K), describe(w, TILE_N, TILE_K), dout_scale, inp_scale, N, K,
        split.whole_tiles, split.split_tiles, split.items, split.steps, split.part_steps,
        ROWS=split.rows, COLUMNS=split.columns, ACC=acc, **OPTIONS,
    )  # fmt: skip
