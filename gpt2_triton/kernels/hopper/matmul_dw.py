"""Weight gradients for Hopper: dw[N, K] (+)= dout.T @ inp, in whole and split tiles as
kernels/matmul.py describes.

Both operands come as they are stored, rows first; wgmma takes the first operand transposed from
shared memory.  The accumulator, 128 x 256, is a tile of dw.  Where tiles of 256 x 128 waste less at
dw's edges, it is a transposed tile.
"""

from collections.abc import Sequence
from typing import Any

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
from gpt2_triton.kernels.tiles import split_item, tile_position
from gpt2_triton.kernels.tuning import programs

# one more than the other products: no tile waits in shared memory to be stored
STAGES = gl.constexpr(4)
# no addresses: divisibility gains nothing.  Nor is one a constant: Triton 3.6 fails on code that
# cannot be reached
COUNTS = ["first2", "turned", "whole_tiles", "split_tiles", "items", "steps", "part_steps", "add"]


@gluon.jit
def select(pair, second):
    chosen = pair[0]
    if second:
        chosen = pair[1]
    return chosen


@gluon.jit
def locate(tile, matrices):
    """Return whether a tile is of the second matrix and whether it is turned, its first row and
    column, and the matrix's N and K.
    """
    first, Ns, Ks, all_turned = matrices
    second = tile >= first
    turned = all_turned & 1
    if second:
        tile -= first
        turned = all_turned >> 1
    rows = BLOCK_M + turned * (BLOCK_N - BLOCK_M)
    columns = BLOCK_N - turned * (BLOCK_N - BLOCK_M)
    N = select(Ns, second)
    K = select(Ks, second)
    tile_n, tile_k = tile_position(tile, gl.cdiv(N, rows), gl.cdiv(K, columns), GROUP_M)
    return second, turned, tile_n * rows, tile_k * columns, N, K


@gluon.jit
def _load_item(a_desc, w_desc, ring, step, a, w, first, count, K_MAJOR: gl.constexpr):
    DEPTH: gl.constexpr = a_desc.block_type.shape[1 if K_MAJOR else 0]
    for s in range(0, count):
        load_blocks(
            a_desc, (w_desc,), ring, step + s, a, w, (first + s) * DEPTH, not K_MAJOR, K_MAJOR
        )


@gluon.jit
def dw_load_partition(descs, second_descs, ring, matrices, work, K_MAJOR: gl.constexpr):
    """Load blocks of a and w, item after item: dout and inp, or inp and dout for a turned tile.
    K_MAJOR: both are stored transposed, contiguous along the rows that are summed.
    """
    whole_tiles, split_tiles, items, steps, part_steps = work
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, first, count, _ = split_item(item, whole_tiles, split_tiles, steps, part_steps)
        second, turned, n, k, _, _ = locate(tile, matrices)
        a = select((n, k), turned != 0)
        w = select((k, n), turned != 0)
        if second:
            _load_item(second_descs[0], second_descs[1], ring, step, a, w, first, count, K_MAJOR)
        else:
            _load_item(descs[0], descs[1], ring, step, a, w, first, count, K_MAJOR)
        step += count


@gluon.jit
def destination(out_ptr, part_ptr, n, k, N, K, slot, turned):
    """Return address, stride, height and width of a tile's place in out, or of a partial sum's slot
    in part, a matrix of the tile's size.
    """
    ptr = out_ptr + (n.to(gl.int64) * K + k)
    stride = K
    height = N - n
    width = K - k
    if slot >= 0:
        ptr = part_ptr + slot.to(gl.int64) * (BLOCK_M * BLOCK_N)
        stride = BLOCK_N - turned * (BLOCK_N - BLOCK_M)
        height = BLOCK_M + turned * (BLOCK_N - BLOCK_M)
        width = stride
    return ptr, stride, height, width


@gluon.jit
def store_part(acc, first, ptr, stride, height, width, slot, add, TURNED: gl.constexpr):
    """Store the columns of an accumulator from `first` on; the addresses of all
    would take too many registers.
    """
    layout: gl.constexpr = acc.type.layout
    i = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    j = first + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    if TURNED:
        at = j.to(gl.int64) * stride + i
        mask = (j < height) & (i < width)
    else:
        at = i.to(gl.int64) * stride + j
        mask = (i < height) & (j < width)
    acc += gl.load(ptr + at, mask=mask & (slot < 0) & (add != 0), other=0.0)
    gl.store(ptr + at, acc, mask=mask)


@gluon.jit
def store_parts(parts, ptr, stride, height, width, slot, add, turned):
    """Store an accumulator, given in equal parts of its columns."""
    WIDTH: gl.constexpr = parts[0].shape[1]
    if turned:
        for q in gl.static_range(len(parts)):
            store_part(parts[q], q * WIDTH, ptr, stride, height, width, slot, add, True)
    else:
        for q in gl.static_range(len(parts)):
            store_part(parts[q], q * WIDTH, ptr, stride, height, width, slot, add, False)


@gluon.jit
def dw_partition(outs, part_ptr, ring, matrices, work, add):
    """Multiply the items; store tiles to out, partial sums to part."""
    whole_tiles, split_tiles, items, steps, part_steps = work
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, _, count, slot = split_item(item, whole_tiles, split_tiles, steps, part_steps)
        second, turned, n, k, N, K = locate(tile, matrices)
        accs = (gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT),)
        accs = issue_mma(accs, ring, step, False, True, False)
        acc, step = mma_loop(accs, ring, step + 1, count, True, False)
        ptr, stride, height, width = destination(
            select(outs, second), part_ptr, n, k, N, K, slot, turned
        )
        store_parts(quarters(acc), ptr, stride, height, width, slot, add, turned)


@gluon.jit(do_not_specialize=COUNTS)
def _dw_kernel(
    out_ptr, out2_ptr, part_ptr, a_desc, w_desc, a2_desc, w2_desc, first2, N, N2, K, K2, turned,
    whole_tiles, split_tiles, items, steps, part_steps, add,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_M], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], w_desc.layout)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES))
    matrices = (first2, (N, N2), (K, K2), turned)
    work = (whole_tiles, split_tiles, items, steps, part_steps)
    # fmt: off
    gl.warp_specialize([
        (dw_partition, ((out_ptr, out2_ptr), part_ptr, ring, matrices, work, add)),
        (dw_load_partition, ((a_desc, w_desc), (a2_desc, w2_desc), ring, matrices, work, False)),
    ], [1], [24])
    # fmt: on


def arguments(
    dws: Sequence[Tensor], scratch: Tensor, douts: Sequence[Tensor], inps: Sequence[Tensor],
    split: TileSplit, a_block: tuple[int, int], w_block: tuple[int, int],
    scales: Sequence[Tensor] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of a kernel for one or two matrices; for one, the second
    is the first, without tiles.

    Bit i of `turned` says whether the tiles of matrix i are turned.
    """
    descs = [
        describe(x, *block)
        for dout, inp, grid in zip(douts, inps, split.grids)
        for x, block in zip((dout, inp) if grid.rows == TILE_M else (inp, dout), (a_block, w_block))
    ]
    first2 = split.grids[1].first if len(dws) == 2 else split.whole_tiles + split.split_tiles
    first, second = dws[0], dws[-1]
    return (
        first, second, scratch, *descs[:2], *descs[-2:], *scales[:2], *scales[-2:], first2,
        first.shape[0], second.shape[0], first.shape[1], second.shape[1],
        sum((grid.rows != TILE_M) << i for i, grid in enumerate(split.grids)),
        split.whole_tiles, split.split_tiles, split.items, split.steps, split.part_steps,
    )  # fmt: skip


def matmul_dw(
    dws: Sequence[Tensor],
    scratch: Tensor,
    douts: Sequence[Tensor],
    inps: Sequence[Tensor],
    split: TileSplit,
    acc: bool,
) -> None:
    """Write each dw (+)= dout.T @ inp for the whole tiles, and the partial sums
    of the others to scratch.
    """
    rest = arguments(dws, scratch, douts, inps, split, (TILE_K, TILE_M), (TILE_K, TILE_N))
    _dw_kernel[(programs(split.items),)](*rest, int(acc), **OPTIONS)
