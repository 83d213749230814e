"""Forward products and dX of matmul.py for Hopper, in Gluon: warps with different work, at the same time.

compute    two warpgroups multiply tiles of 128 x 256 with wgmma, one product always in flight
load       one warp keeps STAGES pairs of blocks on their way by TMA, tile after tile, and never waits for an epilogue
activate   two warps apply GELU or its derivative to the tile just finished while compute multiplies the next
load_pre   one warp brings what the derivative is taken of, some slices ahead of activate

They meet at the barriers of hopper_tiles.py, at two more for the tile c that compute hands on (or, for the residual
add, receives), and at those of the ring of pre's slices.  What a tile holds is the same whichever program computes it,
and has one writer.

gelu(pre) may take pre's place: a slice is in shared memory before activate writes the same elements.

What compute hands on is rounded to bf16: gelu'(pre) meets a product that has been rounded once, as in PyTorch.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gpt2_triton.kernels.device_math import dgelu, gelu
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    LAYOUT,
    OPTIONS,
    STAGES,
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
    tma_store,
)
from gpt2_triton.kernels.tuning import num_sms

ROWS = gl.constexpr(32)  # a slice of a tile is ROWS x 64: 32 numbers for each thread of activate
DOWN = gl.constexpr(BLOCK_M.value // ROWS.value)
SLICES = gl.constexpr(DOWN.value * (BLOCK_N.value // 64))
RING = gl.constexpr(4)


@gluon.jit
def load(
    a_desc, w_desc, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K, W_T: gl.constexpr
):  # fmt: skip
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        for k in range(0, K, BLOCK_K):
            await_empty(empty, step, STAGES)
            stage = step % STAGES
            mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma_load(a_desc, [m, k], full.index(stage), a_bufs.index(stage))
            if W_T:
                tma_load(w_desc, [n, k], full.index(stage), w_bufs.index(stage))
            else:
                tma_load(w_desc, [k, n], full.index(stage), w_bufs.index(stage))
            step += 1
            if res_desc is not None:
                # not before compute has begun this tile, and so stored the last; early enough to hide
                if k == min(STAGES, gl.cdiv(K, BLOCK_K) - 1) * BLOCK_K:
                    mbarrier.wait(c_empty, turn & 1)
                    mbarrier.expect(c_full, res_desc.block_type.nbytes)
                    tma_load(res_desc, [m, n], c_full, c_buf)
        turn += 1


@gluon.jit
def _compute(
    out_desc, b_ptr, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K,
    W_T: gl.constexpr, HAND_ON: gl.constexpr,
):  # fmt: skip
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        acc = multiply(acc, step, a_bufs, w_bufs, full, False, False, W_T, STAGES)
        # while the first product runs
        if b_ptr is not None:
            cols = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
            b = gl.load(b_ptr + cols, mask=cols < N, other=0.0)
        if res_desc is not None:
            tma.store_wait(0)
            mbarrier.arrive(c_empty, count=1)
        steps = gl.cdiv(K, BLOCK_K)
        acc, step = multiply_rest(acc, step + 1, steps, a_bufs, w_bufs, full, empty, False, W_T, STAGES)
        if b_ptr is not None:
            acc += b.to(gl.float32)[None, :]
        if HAND_ON:
            mbarrier.wait(c_empty, (turn & 1) ^ 1)
        elif res_desc is not None:
            mbarrier.wait(c_full, turn & 1)
            acc += c_buf.load(LAYOUT).to(gl.float32)
        else:
            tma.store_wait(0)
        c_buf.store(acc.to(gl.bfloat16))
        fence_async_shared()
        if HAND_ON:
            mbarrier.arrive(c_full, count=1)
        else:
            tma_store(out_desc, [m, n], c_buf)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _load_pre(pre_desc, ring, ring_full, ring_empty, M, N):
    """Slices in the order in which _activate takes them: down 64 columns of the tile, then down the next 64."""
    step = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        for s in range(SLICES):
            await_empty(ring_empty, step, RING)
            slot = step % RING
            mbarrier.expect(ring_full.index(slot), pre_desc.block_type.nbytes)
            tma_load(pre_desc, [m + s % DOWN * ROWS, n + s // DOWN * 64], ring_full.index(slot), ring.index(slot))
            step += 1


@gluon.jit
def _store_slice(ptr, at, value, m, n, M, N):
    """M is a multiple of ROWS and N of 64, so that a slice is inside or outside as a whole."""
    if (m < M) & (n < N):
        gl.store(ptr + (m.to(gl.int64) * N + n) + at, value.to(gl.bfloat16))


@gluon.jit
def _take_pre(ring, ring_full, ring_empty, step, layout: gl.constexpr):
    slot = step % RING
    mbarrier.wait(ring_full.index(slot), step // RING & 1)
    pre = ring.index(slot).load(layout)
    mbarrier.arrive(ring_empty.index(slot), count=1)
    return pre


@gluon.jit
def _activate(
    out_ptr, pre_desc, gelu_ptr, part_ptr, c_buf, c_slices, ring, ring_full, ring_empty, c_full, c_empty, M, N,
    DGELU: gl.constexpr,
):  # fmt: skip
    """c is pre: store it and its gelu.  Or, DGELU, c is the gradient of gelu(pre): multiply it with gelu'(pre)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    cols = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None] * N + cols[None, :]
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        mbarrier.wait(c_full, turn & 1)
        if not DGELU:
            tma_store(pre_desc, [m, n], c_buf)
        else:
            next_pre = _take_pre(ring, ring_full, ring_empty, step, layout)
            sums = gl.zeros([8, 64], gl.float32, layout)
        next_c = c_slices.index(0).load(layout)
        for s in range(SLICES):
            row = m + s % DOWN * ROWS
            col = n + s // DOWN * 64
            c = next_c.to(gl.float32)
            next_c = c_slices.index(min(s + 1, SLICES - 1)).load(layout)  # in time for the next round
            if not DGELU:
                _store_slice(out_ptr, at, gelu(c, FAST=True), row, col, M, N)
            else:
                pre = next_pre.to(gl.float32)
                step += 1
                if s + 1 < SLICES:
                    next_pre = _take_pre(ring, ring_full, ring_empty, step, layout)
                dpre = c * dgelu(pre, FAST=True)
                _store_slice(out_ptr, at, dpre, row, col, M, N)
                if gelu_ptr is not None:
                    _store_slice(gelu_ptr, at, gelu(pre, FAST=True), row, col, M, N)
                # of every eighth row, which one thread holds; rows past the end are 0
                sums += gl.convert_layout(gl.sum(gl.reshape(dpre, [ROWS // 8, 8, 64]), 0), layout)
                if s % DOWN == DOWN - 1:
                    if col < N:
                        gl.store(part_ptr + m // BLOCK_M * N + col + cols, gl.sum(sums, 0))
                    sums = gl.zeros([8, 64], gl.float32, layout)
        if not DGELU:
            tma.store_wait(0)
        mbarrier.arrive(c_empty, count=1)
        turn += 1


@gluon.jit
def _matmul_kernel(
    out_ptr, out_desc, a_desc, w_desc, b_ptr, res_desc, pre_desc, gelu_ptr, part_ptr, M, N, K,
    W_T: gl.constexpr, GELU: gl.constexpr, DGELU: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    # in memory TMA's [BLOCK_M, BLOCK_N] is its columns 0 ... 63, row by row, then the next 64
    c_slices = gl.allocate_shared_memory(gl.bfloat16, [SLICES, ROWS, 64], out_desc.layout)
    c_buf = c_slices.reinterpret(gl.bfloat16, [BLOCK_M, BLOCK_N], out_desc.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    c_full = barriers(1).index(0)
    c_empty = barriers(1).index(0)
    # fmt: off
    if DGELU:
        ring = gl.allocate_shared_memory(gl.bfloat16, [RING, ROWS, 64], pre_desc.layout)
        ring_full = barriers(RING)
        ring_empty = barriers(RING)
        gl.warp_specialize([
            (_compute, (out_desc, b_ptr, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty,
                        M, N, K, W_T, True)),
            (_activate, (out_ptr, pre_desc, gelu_ptr, part_ptr, c_buf, c_slices, ring, ring_full, ring_empty,
                         c_full, c_empty, M, N, True)),
            (load, (a_desc, w_desc, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K, W_T)),
            (_load_pre, (pre_desc, ring, ring_full, ring_empty, M, N)),
        ], [2, 1, 1], [184, 184, 184])
    elif GELU:
        gl.warp_specialize([
            (_compute, (out_desc, b_ptr, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty,
                        M, N, K, W_T, True)),
            (_activate, (out_ptr, pre_desc, None, None, c_buf, c_slices, None, None, None,
                         c_full, c_empty, M, N, False)),
            (load, (a_desc, w_desc, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K, W_T)),
        ], [2, 1], [104, 104])
    else:
        gl.warp_specialize([
            (_compute, (out_desc, b_ptr, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty,
                        M, N, K, W_T, False)),
            (load, (a_desc, w_desc, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K, W_T)),
        ], [1], [24])
    # fmt: on


def matmul(
    out: Tensor, a: Tensor, w: Tensor, b: Tensor | None, *, w_is_nk: bool, epilogue: str,
    res: Tensor | None, pre: Tensor | None, gelu_out: Tensor | None, part: Tensor | None,
) -> None:  # fmt: skip
    """out[M, N] = epilogue(a[M, K] @ w): what matmul.py's kernel does, and with its arguments."""
    (M, K), N = a.shape, out.shape[1]
    w_desc = describe(w, TILE_N, TILE_K) if w_is_nk else describe(w, TILE_K, TILE_N)
    pre_desc = describe(pre, ROWS.value, 64) if epilogue == "dgelu" else describe(pre, TILE_M, TILE_N)
    programs = min(num_sms(), triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N))
    _matmul_kernel[(programs,)](
        out, describe(out, TILE_M, TILE_N), describe(a, TILE_M, TILE_K), w_desc, b, describe(res, TILE_M, TILE_N),
        pre_desc, gelu_out, part, M, N, K,
        W_T=w_is_nk, GELU=epilogue == "gelu", DGELU=epilogue == "dgelu", **OPTIONS,
    )  # fmt: skip
