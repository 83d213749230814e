"""Weight gradients for Hopper: out[split, N, K] (+)= dout[rows].T @ inp[rows], as matmul.py describes.

Both operands come as they are stored, rows first; wgmma takes the first one transposed from shared memory.
"""

import triton
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
from gpt2_triton.kernels.tuned import num_sms

STAGES = gl.constexpr(4)  # one more than the other products: no tile waits in shared memory to be stored


@gluon.jit
def _dw_load(dout_desc, inp_desc, a_bufs, w_bufs, full, empty, N, K, splits, steps):
    step = 0
    for item in range(gl.program_id(0), tiles(N, K) * splits, gl.num_programs(0)):
        n, k = corner(item % tiles(N, K), N, K)
        first = item // tiles(N, K) * steps  # the tiles of one split run together and share its rows in L2
        for s in range(first, first + steps):
            await_empty(empty, step, STAGES)
            stage = step % STAGES
            mbarrier.expect(full.index(stage), dout_desc.block_type.nbytes + inp_desc.block_type.nbytes)
            tma_load(dout_desc, [s * BLOCK_K, n], full.index(stage), a_bufs.index(stage))
            tma_load(inp_desc, [s * BLOCK_K, k], full.index(stage), w_bufs.index(stage))
            step += 1


@gluon.jit
def _dw_compute(out_ptr, a_bufs, w_bufs, full, empty, N, K, splits, steps, ACC: gl.constexpr):
    step = 0
    for item in range(gl.program_id(0), tiles(N, K) * splits, gl.num_programs(0)):
        n, k = corner(item % tiles(N, K), N, K)
        rows = n + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
        cols = k + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        at = (item // tiles(N, K) * N + rows).to(gl.int64)[:, None] * K + cols[None, :]
        mask = (rows < N)[:, None] & (cols < K)[None, :]
        if ACC:
            acc = gl.load(out_ptr + at, mask=mask, other=0.0)
        else:
            acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        acc = multiply(acc, step, a_bufs, w_bufs, full, ACC, True, False, STAGES)
        acc, step = multiply_rest(acc, step + 1, steps, a_bufs, w_bufs, full, empty, True, False, STAGES)
        gl.store(out_ptr + at, acc, mask=mask)


@gluon.jit
def _dw_kernel(out_ptr, dout_desc, inp_desc, N, K, splits, steps, ACC: gl.constexpr):
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_M], dout_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, BLOCK_N], inp_desc.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    gl.warp_specialize(
        [
            (_dw_compute, (out_ptr, a_bufs, w_bufs, full, empty, N, K, splits, steps, ACC)),
            (_dw_load, (dout_desc, inp_desc, a_bufs, w_bufs, full, empty, N, K, splits, steps)),
        ],
        [1],
        [24],
    )


def matmul_dw(out: Tensor, dout: Tensor, inp: Tensor, splits: int, steps: int, acc: bool) -> None:
    """out[split, N, K] (+)= dout.T @ inp over the split's rows, `steps` blocks of BLOCK_K."""
    N, K = dout.shape[1], inp.shape[1]
    programs = min(num_sms(), triton.cdiv(N, TILE_M) * triton.cdiv(K, TILE_N) * splits)
    _dw_kernel[(programs,)](
        out, describe(dout, TILE_K, TILE_M), describe(inp, TILE_K, TILE_N), N, K, splits, steps, ACC=acc, **OPTIONS
    )
