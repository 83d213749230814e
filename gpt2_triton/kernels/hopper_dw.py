"""Weight gradients for Hopper: dw[N, K] (+)= dout.T @ inp, tiles whole or in pieces as matmul.py describes.

Both operands come as they are stored, rows first; wgmma takes the first one transposed from shared memory.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gpt2_triton.kernels.hopper_tiles import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    LAYOUT,
    OPTIONS,
    TILE_K,
    TILE_M,
    TILE_N,
    await_empty,
    barriers,
    corner,
    describe,
    multiply,
    multiply_rest,
    tiles,
    tma_load,
)
from gpt2_triton.kernels.tile import Cut
from gpt2_triton.kernels.tuned import num_sms

STAGES = gl.constexpr(4)  # one more than the other products: no tile waits in shared memory to be stored


@gluon.jit
def _work(item, N, K, whole, steps, piece_steps):
    """Of an item: its tile's corner, its first step and how many it has, and its place among the pieces or -1."""
    rest = tiles(N, K) - whole
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
    n, k = corner(tile, N, K)
    return n, k, first, count, slot


@gluon.jit
def _dw_load(dout_desc, inp_desc, a_bufs, w_bufs, full, empty, N, K, whole, items, steps, piece_steps):
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, k, first, count, _ = _work(item, N, K, whole, steps, piece_steps)
        for s in range(first, first + count):
            await_empty(empty, step, STAGES)
            stage = step % STAGES
            mbarrier.expect(full.index(stage), dout_desc.block_type.nbytes + inp_desc.block_type.nbytes)
            tma_load(dout_desc, [s * BLOCK_K, n], full.index(stage), a_bufs.index(stage))
            tma_load(inp_desc, [s * BLOCK_K, k], full.index(stage), w_bufs.index(stage))
            step += 1


@gluon.jit
def _dw_compute(
    out_ptr, part_ptr, a_bufs, w_bufs, full, empty, N, K, whole, items, steps, piece_steps, ACC: gl.constexpr
):
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        n, k, first, count, slot = _work(item, N, K, whole, steps, piece_steps)
        # a piece is a matrix of BLOCK_M x BLOCK_N in itself
        ptr = out_ptr + (n.to(gl.int64) * K + k)
        stride = K
        height = N - n
        width = K - k
        if slot >= 0:
            ptr = part_ptr + slot.to(gl.int64) * (BLOCK_M * BLOCK_N)
            stride = BLOCK_N
            height = BLOCK_M
            width = BLOCK_N
        rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        at = rows.to(gl.int64)[:, None] * stride + cols[None, :]
        mask = (rows < height)[:, None] & (cols < width)[None, :]
        if ACC:
            acc = gl.load(ptr + at, mask=mask & (slot < 0), other=0.0)
        else:
            acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        acc = multiply(acc, step, a_bufs, w_bufs, full, ACC, True, False, STAGES)
        acc, step = multiply_rest(acc, step + 1, count, a_bufs, w_bufs, full, empty, True, False, STAGES)
        gl.store(ptr + at, acc, mask=mask)


@gluon.jit
def _dw_kernel(out_ptr, part_ptr, dout_desc, inp_desc, N, K, whole, items, steps, piece_steps, ACC: gl.constexpr):
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_M], dout_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], inp_desc.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    gl.warp_specialize(
        [
            (
                _dw_compute,
                (out_ptr, part_ptr, a_bufs, w_bufs, full, empty, N, K, whole, items, steps, piece_steps, ACC),
            ),
            (
                _dw_load,
                (dout_desc, inp_desc, a_bufs, w_bufs, full, empty, N, K, whole, items, steps, piece_steps),
            ),
        ],
        [1],
        [24],
    )


def matmul_dw(dw: Tensor, scratch: Tensor, dout: Tensor, inp: Tensor, cut: Cut, acc: bool) -> None:
    """dw (+)= dout.T @ inp for the tiles that are whole; the pieces of the others into scratch."""
    N, K = dw.shape
    items = cut.whole + cut.rest * cut.pieces
    _dw_kernel[(min(num_sms(), items),)](
        dw, scratch, describe(dout, TILE_K, TILE_M), describe(inp, TILE_K, TILE_N), N, K,
        cut.whole, items, cut.steps, cut.piece_steps, ACC=acc, **OPTIONS,
    )  # fmt: skip
