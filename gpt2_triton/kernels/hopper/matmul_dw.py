"""Weight gradients for Hopper: dw[N, K] (+)= dout.T @ inp, tiles whole or in pieces as matmul.py describes.

Both operands come as they are stored, rows first; wgmma takes the first one transposed from shared memory.  The
accumulator, 128 x 256, is a tile of dw or, where those waste less at dw's edges, one of its transpose.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
    await_empty,
    barriers,
    describe,
    multiply,
    multiply_rest,
    tma_load,
)
from gpt2_triton.kernels.tiles import Cut, quarters, tile_position
from gpt2_triton.kernels.tuning import num_sms

STAGES = gl.constexpr(4)  # one more than the other products: no tile waits in shared memory to be stored


@gluon.jit
def _work(item, N, K, whole, rest, steps, piece_steps, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Of an item: its tile's corner, its first step and how many it has, and its place among the pieces or -1."""
    slot = item - whole
    tile = item
    first = 0
    count = steps
    if slot >= 0:
        tile = whole + slot % rest  # the pieces of the same rows run together and share them in L2
        first = slot // rest * piece_steps
        count = piece_steps
    else:
        slot = -1
    tile_n, tile_k = tile_position(tile, gl.cdiv(N, ROWS), gl.cdiv(K, COLUMNS), GROUP_M)
    return tile_n * ROWS, tile_k * COLUMNS, first, count, slot


@gluon.jit
def _dw_load(
    a_desc, w_desc, a_bufs, w_bufs, full, empty, N, K, whole, rest, items, steps, piece_steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, k, first, count, _ = _work(item, N, K, whole, rest, steps, piece_steps, ROWS, COLUMNS)
        a = n if ROWS == BLOCK_M else k
        w = k if ROWS == BLOCK_M else n
        for s in range(first, first + count):
            await_empty(empty, step, STAGES)
            stage = step % STAGES
            mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(a_desc, [s * BLOCK_K, a], full.index(stage), a_bufs.index(stage))
            tma_load(w_desc, [s * BLOCK_K, w], full.index(stage), w_bufs.index(stage))
            step += 1


@gluon.jit
def _store(acc, first, ptr, stride, height, width, slot, TURNED: gl.constexpr, ACC: gl.constexpr):
    """Part of an accumulator, from column `first` on: the addresses of all would take too many registers."""
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
def _dw_compute(
    out_ptr, part_ptr, a_bufs, w_bufs, full, empty, N, K, whole, rest, items, steps, piece_steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, k, _, count, slot = _work(item, N, K, whole, rest, steps, piece_steps, ROWS, COLUMNS)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        acc = multiply(acc, step, a_bufs, w_bufs, full, False, True, False, STAGES)
        acc, step = multiply_rest(acc, step + 1, count, a_bufs, w_bufs, full, empty, True, False, STAGES)
        # a piece is a matrix of ROWS x COLUMNS in itself
        ptr = out_ptr + (n.to(gl.int64) * K + k)
        stride = K
        height = N - n
        width = K - k
        if slot >= 0:
            ptr = part_ptr + slot.to(gl.int64) * (ROWS * COLUMNS)
            stride = COLUMNS
            height = ROWS
            width = COLUMNS
        first, second, third, fourth = quarters(acc)
        _store(first, 0, ptr, stride, height, width, slot, ROWS == BLOCK_N, ACC)
        _store(second, BLOCK_N // 4, ptr, stride, height, width, slot, ROWS == BLOCK_N, ACC)
        _store(third, BLOCK_N // 2, ptr, stride, height, width, slot, ROWS == BLOCK_N, ACC)
        _store(fourth, 3 * BLOCK_N // 4, ptr, stride, height, width, slot, ROWS == BLOCK_N, ACC)


@gluon.jit
def _dw_kernel(
    out_ptr, part_ptr, a_desc, w_desc, N, K, whole, rest, items, steps, piece_steps,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_M], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], w_desc.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    # fmt: off
    gl.warp_specialize([
        (_dw_compute, (out_ptr, part_ptr, a_bufs, w_bufs, full, empty, N, K, whole, rest, items, steps, piece_steps,
                       ROWS, COLUMNS, ACC)),
        (_dw_load, (a_desc, w_desc, a_bufs, w_bufs, full, empty, N, K, whole, rest, items, steps, piece_steps,
                    ROWS, COLUMNS)),
    ], [1], [24])
    # fmt: on


def matmul_dw(dw: Tensor, scratch: Tensor, dout: Tensor, inp: Tensor, cut: Cut, acc: bool) -> None:
    """dw (+)= dout.T @ inp for the tiles that are whole; the pieces of the others into scratch."""
    (N, K), items = dw.shape, cut.whole + cut.rest * cut.pieces
    a, w = (dout, inp) if cut.rows == TILE_M else (inp, dout)
    _dw_kernel[(min(num_sms(), items),)](
        dw, scratch, describe(a, TILE_K, TILE_M), describe(w, TILE_K, TILE_N), N, K,
        cut.whole, cut.rest, items, cut.steps, cut.piece_steps,
        ROWS=cut.rows, COLUMNS=cut.columns, ACC=acc, **OPTIONS,
    )  # fmt: skip
