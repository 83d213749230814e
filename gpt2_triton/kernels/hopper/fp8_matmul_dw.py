"""Weight gradients of fp8 operands for Hopper: dw[N, K] (+)= dout[N, R] @
inp[K, R].T / scales, in fp32.

The sums of each 256 tokens are added in fp32, by the warpgroups of fp8_matmul.py: two
steps, as four stages are enough for them.  They err by 0.02% where sums of 128 err by
0.013%, and take 3 to 4% less energy.
"""

from collections.abc import Sequence

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
from gpt2_triton.kernels.hopper.matmul_dw import (
    COUNTS,
    STAGES,
    arguments,
    destination,
    dw_load_partition,
    locate,
    select,
    store_parts,
)
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    TILE_M,
    TILE_N,
    Operands,
    barriers,
    quarters,
)
from gpt2_triton.kernels.tiles import split_item
from gpt2_triton.kernels.tuning import programs


@gluon.jit
def fp8_dw_partition(
    outs, part_ptr, scales, second_scales, ring, matrices, work, add, GROUP: gl.constexpr
):
    """Multiply a warpgroup's part of the items; store tiles to out, partial sums to part."""
    whole_tiles, split_tiles, items, steps, part_steps = work
    unscales = (unscale_of(scales[0], scales[1]), unscale_of(second_scales[0], second_scales[1]))
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, _, count, slot = split_item(item, whole_tiles, split_tiles, steps, part_steps)
        second, turned, n, k, N, K = locate(tile, matrices)
        whole = k + HALF < K
        if turned:
            whole = n + HALF < N
        left, right, step = multiply_in_parts(ring, step, count, whole, GROUP, 2)
        unscale = select(unscales, second)
        ptr, stride, height, width = destination(
            select(outs, second), part_ptr, n, k, N, K, slot, turned
        )
        if turned:
            ptr += ROWS_OF_GROUP * GROUP
            width -= ROWS_OF_GROUP * GROUP
        else:
            ptr += ROWS_OF_GROUP * GROUP * stride
            height -= ROWS_OF_GROUP * GROUP
        parts = quarters(left * unscale) + quarters(right * unscale)
        store_parts(parts, ptr, stride, height, width, slot, add, turned)


@gluon.jit(
    do_not_specialize=COUNTS,
    do_not_specialize_on_alignment=[
        "dout_scale_ptr", "inp_scale_ptr", "dout2_scale_ptr", "inp2_scale_ptr"
    ],
)  # fmt: skip
def _fp8_dw_kernel(
    out_ptr, out2_ptr, part_ptr, a_desc, w_desc, a2_desc, w2_desc,
    dout_scale_ptr, inp_scale_ptr, dout2_scale_ptr, inp2_scale_ptr, first2, N, N2, K, K2, turned,
    whole_tiles, split_tiles, items, steps, part_steps, add,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES, 2))
    outs = (out_ptr, out2_ptr)
    scales = (dout_scale_ptr, inp_scale_ptr)
    second_scales = (dout2_scale_ptr, inp2_scale_ptr)
    matrices = (first2, (N, N2), (K, K2), turned)
    work = (whole_tiles, split_tiles, items, steps, part_steps)
    # fmt: off
    gl.warp_specialize([
        (fp8_dw_partition, (outs, part_ptr, scales, second_scales, ring, matrices, work, add, 0)),
        (fp8_dw_partition, (outs, part_ptr, scales, second_scales, ring, matrices, work, add, 1)),
        (dw_load_partition, ((a_desc, w_desc), (a2_desc, w2_desc), ring, matrices, work, True)),
    ], [4, 1], [240, 24])
    # fmt: on


def matmul_dw(
    dws: Sequence[Tensor], scratch: Tensor, douts: Sequence[Tensor], inps: Sequence[Tensor],
    scales: Sequence[tuple[Tensor, Tensor]], split: TileSplit, acc: bool,
) -> None:  # fmt: skip
    """Write the whole tiles of each dw (+)= dout[N, R] @ inp[K, R].T / scales, and partial
    sums of the others to scratch.
    """
    flat = [scale for pair in scales for scale in pair]
    rest = arguments(dws, scratch, douts, inps, split, (TILE_M, TILE_K), (TILE_N, TILE_K), flat)
    _fp8_dw_kernel[(programs(split.items),)](*rest, int(acc), **OPTIONS)
