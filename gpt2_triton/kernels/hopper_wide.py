"""Products of hopper.py in tiles of 128 x 320, where those of 256 columns waste more: 1558M's 1,600 are five of them.

An accumulator is two, of 256 columns and of 64, as wgmma takes no more than 256 and Triton's shapes are powers of two.
Both are summed in hopper.py's order, to the same bits.  Blocks are half as deep, so that five stages and the tile that
leaves fit into shared memory.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gpt2_triton.kernels.hopper_tiles import (
    BLOCK_M,
    GROUP_M,
    LAYOUT,
    OPTIONS,
    TILE_M,
    TILE_N,
    await_empty,
    barriers,
    describe,
    tma_load,
    tma_store,
)
from gpt2_triton.kernels.tile import halves, tile_position
from gpt2_triton.kernels.tuned import num_sms

WIDTH = 320
MORE = gl.constexpr(64)
PARTS = gl.constexpr(WIDTH // 64)
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(32)
STAGES = gl.constexpr(5)
MORE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16]))


@gluon.jit
def _tiles(M, N):
    return gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N + MORE)


@gluon.jit
def _corner(tile, M, N):
    tile_m, tile_n = tile_position(tile, gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N + MORE), GROUP_M)
    return tile_m * BLOCK_M, tile_n * (BLOCK_N + MORE)


@gluon.jit
def _load(
    a_desc, w_desc, w_more_desc, res_desc, a_bufs, w_bufs, w_more_bufs, c_parts,
    full, empty, c_full, c_empty, M, N, K, W_T: gl.constexpr,
):  # fmt: skip
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), _tiles(M, N), gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        for k in range(0, K, BLOCK_K):
            await_empty(empty, step, STAGES)
            stage = step % STAGES
            bar = full.index(stage)
            nbytes: gl.constexpr = a_desc.block_type.nbytes + w_desc.block_type.nbytes + w_more_desc.block_type.nbytes
            mbarrier.expect(bar, nbytes)
            tma_load(a_desc, [m, k], bar, a_bufs.index(stage))
            if W_T:
                tma_load(w_desc, [n, k], bar, w_bufs.index(stage))
                tma_load(w_more_desc, [n + BLOCK_N, k], bar, w_more_bufs.index(stage))
            else:
                tma_load(w_desc, [k, n], bar, w_bufs.index(stage))
                tma_load(w_more_desc, [k, n + BLOCK_N], bar, w_more_bufs.index(stage))
            step += 1
            if res_desc is not None:
                if k == min(STAGES, gl.cdiv(K, BLOCK_K) - 1) * BLOCK_K:
                    mbarrier.wait(c_empty, turn & 1)
                    mbarrier.expect(c_full, PARTS * res_desc.block_type.nbytes)
                    for part in range(PARTS):
                        tma_load(res_desc, [m, n + part * MORE], c_full, c_parts.index(part))
        turn += 1


@gluon.jit
def _multiply(acc, more, step, a_bufs, w_bufs, w_more_bufs, full, use_acc, W_T: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    a = a_bufs.index(stage)
    w = w_bufs.index(stage)
    w_more = w_more_bufs.index(stage)
    if W_T:
        w = w.permute((1, 0))
        w_more = w_more.permute((1, 0))
    acc = warpgroup_mma(a, w, acc, use_acc=use_acc, is_async=True)
    more = warpgroup_mma(a, w_more, more, use_acc=use_acc, is_async=True)
    return acc, more


@gluon.jit
def _finish(acc, part, b_ptr, ADD: gl.constexpr, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_parts, m, n, M, N):
    """Bias and residual of 64 columns, or the head's factors and its targets' rows of wte; the result lies in c."""
    c = c_parts.index(part)
    cols = n + part * MORE + gl.arange(0, MORE, layout=gl.SliceLayout(0, acc.type.layout))
    if b_ptr is not None:
        acc += gl.load(b_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
    if ADD:
        acc += c.load(acc.type.layout).to(gl.float32)
    if wte_ptr is not None:
        rows = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, acc.type.layout))
        rs = gl.load(rs_ptr + rows, mask=rows < M, other=0.0)
        ks = gl.load(ks_ptr + rows, mask=rows < M, other=0.0)
        target = gl.load(targets_ptr + rows, mask=rows < M, other=-1).to(gl.int64)
        mask = (target >= 0)[:, None] & (cols < N)[None, :]
        wte = gl.load(wte_ptr + target[:, None] * N + cols[None, :], mask=mask, other=0.0).to(gl.float32)
        acc = rs[:, None] * acc + ks[:, None] * wte
    c.store(acc.to(gl.bfloat16))


@gluon.jit
def _compute(
    out_desc, b_ptr, res_desc, rs_ptr, ks_ptr, targets_ptr, wte_ptr, a_bufs, w_bufs, w_more_bufs, c_parts,
    full, empty, c_full, c_empty, M, N, K, W_T: gl.constexpr,
):  # fmt: skip
    ADD: gl.constexpr = res_desc is not None
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), _tiles(M, N), gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        more = gl.zeros([BLOCK_M, MORE], gl.float32, MORE_LAYOUT)
        acc, more = _multiply(acc, more, step, a_bufs, w_bufs, w_more_bufs, full, False, W_T)
        step += 1
        if res_desc is not None:
            tma.store_wait(0)
            mbarrier.arrive(c_empty, count=1)
        for _ in range(1, gl.cdiv(K, BLOCK_K)):
            acc, more = _multiply(acc, more, step, a_bufs, w_bufs, w_more_bufs, full, True, W_T)
            acc, more = warpgroup_mma_wait(2, deps=(acc, more))
            acc = warpgroup_mma_init(acc)
            more = warpgroup_mma_init(more)
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        acc, more = warpgroup_mma_wait(0, deps=(acc, more))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if res_desc is not None:
            mbarrier.wait(c_full, turn & 1)
        else:
            tma.store_wait(0)
        left, right = halves(acc)
        first, second = halves(left)
        third, fourth = halves(right)
        _finish(first, 0, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_parts, m, n, M, N)
        _finish(second, 1, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_parts, m, n, M, N)
        _finish(third, 2, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_parts, m, n, M, N)
        _finish(fourth, 3, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_parts, m, n, M, N)
        _finish(more, 4, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_parts, m, n, M, N)
        fence_async_shared()
        for part in range(PARTS):
            tma_store(out_desc, [m, n + part * MORE], c_parts.index(part))
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _wide_kernel(
    out_desc, a_desc, w_desc, w_more_desc, b_ptr, res_desc, rs_ptr, ks_ptr, targets_ptr, wte_ptr, M, N, K,
    W_T: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    w_more_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_more_desc.block_type.shape, w_more_desc.layout)
    c_parts = gl.allocate_shared_memory(gl.bfloat16, [PARTS, BLOCK_M, MORE], out_desc.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    c_full = barriers(1).index(0)
    c_empty = barriers(1).index(0)
    # fmt: off
    gl.warp_specialize([
        (_compute, (out_desc, b_ptr, res_desc, rs_ptr, ks_ptr, targets_ptr, wte_ptr, a_bufs, w_bufs, w_more_bufs,
                    c_parts, full, empty, c_full, c_empty, M, N, K, W_T)),
        (_load, (a_desc, w_desc, w_more_desc, res_desc, a_bufs, w_bufs, w_more_bufs, c_parts,
                 full, empty, c_full, c_empty, M, N, K, W_T)),
    ], [1], [24])
    # fmt: on


def is_better(M: int, N: int) -> bool:
    """Do tiles of 320 columns take less time than tiles of 256?"""

    def columns(width: int) -> int:
        return width * triton.cdiv(triton.cdiv(M, TILE_M) * triton.cdiv(N, width), num_sms())

    return columns(WIDTH) < 0.95 * columns(TILE_N)


def _launch(
    out: Tensor, a: Tensor, w: Tensor, b: Tensor | None = None, *, w_is_nk: bool, res: Tensor | None = None,
    rs: Tensor | None = None, ks: Tensor | None = None, targets: Tensor | None = None, wte: Tensor | None = None,
) -> None:  # fmt: skip
    (M, K), N = a.shape, out.shape[1]
    k, more = BLOCK_K.value, MORE.value
    w_desc, w_more_desc = (describe(w, c, k) if w_is_nk else describe(w, k, c) for c in (TILE_N, more))
    programs = min(num_sms(), triton.cdiv(M, TILE_M) * triton.cdiv(N, WIDTH))
    _wide_kernel[(programs,)](
        describe(out, TILE_M, more), describe(a, TILE_M, k), w_desc, w_more_desc, b, describe(res, TILE_M, more),
        rs, ks, targets, wte, M, N, K, W_T=w_is_nk, **OPTIONS,
    )  # fmt: skip


def matmul(out: Tensor, a: Tensor, w: Tensor, b: Tensor | None, *, w_is_nk: bool, res: Tensor | None) -> None:
    """out[M, N] = a[M, K] @ w (+ b) (+ res)."""
    _launch(out, a, w, b, w_is_nk=w_is_nk, res=res)


def classifier_dx(dln: Tensor, p: Tensor, wte: Tensor, rs: Tensor, ks: Tensor, targets: Tensor) -> None:
    """dln[R, C] = rs * (p[R, Vp] @ wte) + ks * wte[target]."""
    _launch(dln, p, wte, w_is_nk=False, rs=rs, ks=ks, targets=targets, wte=wte)
