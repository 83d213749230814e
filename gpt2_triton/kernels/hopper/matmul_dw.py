"""Weight gradients for Hopper: dw[N, K] (+)= dout.T @ inp, in whole and split tiles as kernels/matmul.py describes.

Both operands come as they are stored, rows first; wgmma takes the first operand transposed from shared memory.  The
accumulator, 128 x 256, is a tile of dw.  Where tiles of 256 x 128 waste less at dw's edges, it is a transposed tile.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gpt2_triton.kernels.dw_split import TileSplit
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    GROUP_M,
    LAYOUT,
    OPTIONS,
    TILE_K,
    TILE_M,
    TILE_N,
    Operands,
    barriers,
    describe,
    issue_mma,
    load_blocks,
    mma_loop,
    quarters,
)
from gpt2_triton.kernels.tiles import split_item, tile_corner
from gpt2_triton.kernels.tuning import programs

STAGES = gl.constexpr(4)  # one more than the other products: no tile waits in shared memory to be stored


@gluon.jit
def dw_load_partition(
    a_desc, w_desc, ring, N, K, work, ROWS: gl.constexpr, COLUMNS: gl.constexpr, K_MAJOR: gl.constexpr
):  # fmt: skip
    """Load blocks of a and w, item after item: dout and inp, or inp and dout for a turned tile.  K_MAJOR: both are
    stored transposed, contiguous along the rows that are summed.
    """
    DEPTH: gl.constexpr = a_desc.block_type.shape[1 if K_MAJOR else 0]
    whole_tiles, split_tiles, items, steps, part_steps = work
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, first, count, _ = split_item(item, whole_tiles, split_tiles, steps, part_steps)
        n, k = tile_corner(tile, N, K, ROWS, COLUMNS, GROUP_M)
        a = n if ROWS == BLOCK_M else k
        w = k if ROWS == BLOCK_M else n
        for s in range(first, first + count):
            load_blocks(a_desc, (w_desc,), ring, step, a, w, s * DEPTH, not K_MAJOR, K_MAJOR)
            step += 1


@gluon.jit
def destination(out_ptr, part_ptr, n, k, N, K, slot, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return address, stride, height and width of a tile's place in out, or of a partial sum's slot in part, a matrix
    of ROWS x COLUMNS.
    """
    ptr = out_ptr + (n.to(gl.int64) * K + k)
    stride = K
    height = N - n
    width = K - k
    if slot >= 0:
        ptr = part_ptr + slot.to(gl.int64) * (ROWS * COLUMNS)
        stride = COLUMNS
        height = ROWS
        width = COLUMNS
    return ptr, stride, height, width


@gluon.jit
def store_quarter(acc, first, ptr, stride, height, width, slot, TURNED: gl.constexpr, ACC: gl.constexpr):
    """Store the columns of an accumulator from `first` on; the addresses of all would take too many registers."""
    layout: gl.constexpr = acc.type.layout
    i = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    j = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    if TURNED:
        at = j.to(gl.int64) * stride + i
        mask = (j < height) & (i < width)
    else:
        at = i.to(gl.int64) * stride + j
        mask = (i < height) & (j < width)
    if ACC:
        acc += gl.load(ptr + at, mask=mask & (slot < 0), other=0.0)
    gl.store(ptr + at, acc, mask=mask)


@gluon.jit
def dw_partition(
    out_ptr, part_ptr, ring, N, K, work, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr
):  # fmt: skip
    """Multiply the items; store tiles to out, partial sums to part."""
    whole_tiles, split_tiles, items, steps, part_steps = work
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, _, count, slot = split_item(item, whole_tiles, split_tiles, steps, part_steps)
        n, k = tile_corner(tile, N, K, ROWS, COLUMNS, GROUP_M)
        accs = (gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT),)
        accs = issue_mma(accs, ring, step, False, True, False)
        acc, step = mma_loop(accs, ring, step + 1, count, True, False)
        ptr, stride, height, width = destination(out_ptr, part_ptr, n, k, N, K, slot, ROWS, COLUMNS)
        parts = quarters(acc)
        for q in gl.static_range(4):
            store_quarter(
                parts[q], q * (BLOCK_N // 4), ptr, stride, height, width, slot, ROWS == BLOCK_N, ACC
            )  # fmt: skip


@gluon.jit
def _dw_kernel(
    out_ptr, part_ptr, a_desc, w_desc, N, K, whole_tiles, split_tiles, items, steps, part_steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_M], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], w_desc.layout)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES))
    work = (whole_tiles, split_tiles, items, steps, part_steps)
    # fmt: off
    gl.warp_specialize([
        (dw_partition, (out_ptr, part_ptr, ring, N, K, work, ROWS, COLUMNS, ACC)),
        (dw_load_partition, (a_desc, w_desc, ring, N, K, work, ROWS, COLUMNS, False)),
    ], [1], [24])
    # fmt: on


def matmul_dw(dw: Tensor, scratch: Tensor, dout: Tensor, inp: Tensor, split: TileSplit, acc: bool) -> None:
    """Write dw (+)= dout.T @ inp for the whole tiles, and the partial sums of the others to scratch."""
    N, K = dw.shape
    a, w = (dout, inp) if split.rows == TILE_M else (inp, dout)
    _dw_kernel[(programs(split.items),)](
        dw, scratch, describe(a, TILE_K, TILE_M), describe(w, TILE_K, TILE_N), N, K,
        split.whole_tiles, split.split_tiles, split.items, split.steps, split.part_steps,
        ROWS=split.rows, COLUMNS=split.columns, ACC=acc, **OPTIONS,
    )  # fmt: skip
