"""Products of hopper.py, and the head's dX, in tiles of 128 x 320, where tiles of 256 columns would waste more: 1558M's
1,600 columns are five of them.

An accumulator is two, of 256 columns and of a strip of 64: wgmma takes no more than 256, and Triton's shapes are powers
of two.  Both are summed in hopper.py's order, to the same bits.  Blocks are half as deep, so that five stages and the
tile that leaves fit into shared memory.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    LAYOUT,
    OPTIONS,
    TILE_M,
    TILE_N,
    await_empty,
    barriers,
    corner,
    describe,
    multiply,
    tiles,
    tma_load,
    tma_store,
)
from gpt2_triton.kernels.tiles import quarters
from gpt2_triton.kernels.tuning import num_sms

WIDTH = gl.constexpr(320)
STRIP = gl.constexpr(WIDTH.value - TILE_N)  # columns of the second accumulator, and of what is stored at once
STRIPS = gl.constexpr(WIDTH.value // STRIP.value)
STRIP_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, STRIP.value, 16]))
BLOCK_K = gl.constexpr(32)
STAGES = gl.constexpr(5)


@gluon.jit
def _load(
    a_desc, w_desc, w_strip_desc, res_desc, a_bufs, w_bufs, w_strip_bufs, c_strips,
    full, empty, c_full, c_empty, M, N, K, W_T: gl.constexpr,
):  # fmt: skip
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, WIDTH), gl.num_programs(0)):
        m, n = corner(tile, M, N, WIDTH)
        for k in range(0, K, BLOCK_K):
            await_empty(empty, step, STAGES)
            stage = step % STAGES
            bar = full.index(stage)
            nbytes: gl.constexpr = a_desc.block_type.nbytes + w_desc.block_type.nbytes + w_strip_desc.block_type.nbytes
            mbarrier.expect(bar, nbytes)
            tma_load(a_desc, [m, k], bar, a_bufs.index(stage))
            if W_T:
                tma_load(w_desc, [n, k], bar, w_bufs.index(stage))
                tma_load(w_strip_desc, [n + BLOCK_N, k], bar, w_strip_bufs.index(stage))
            else:
                tma_load(w_desc, [k, n], bar, w_bufs.index(stage))
                tma_load(w_strip_desc, [k, n + BLOCK_N], bar, w_strip_bufs.index(stage))
            step += 1
            if res_desc is not None:
                # as in hopper.py: not before compute has begun this tile, and so stored the last; early enough to hide
                if k == min(STAGES, gl.cdiv(K, BLOCK_K) - 1) * BLOCK_K:
                    mbarrier.wait(c_empty, turn & 1)
                    mbarrier.expect(c_full, STRIPS * res_desc.block_type.nbytes)
                    for s in range(STRIPS):
                        tma_load(res_desc, [m, n + s * STRIP], c_full, c_strips.index(s))
        turn += 1


@gluon.jit
def _multiply(acc, strip, step, a_bufs, w_bufs, w_strip_bufs, full, use_acc, W_T: gl.constexpr):
    acc = multiply(acc, step, a_bufs, w_bufs, full, use_acc, False, W_T, STAGES)
    strip = multiply(strip, step, a_bufs, w_strip_bufs, full, use_acc, False, W_T, STAGES)
    return acc, strip


@gluon.jit
def _finish(acc, s, b_ptr, ADD: gl.constexpr, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_strips, m, n, M, N):
    """Bias and residual of 64 columns, or the head's factors and its targets' rows of wte.  The result takes the place
    of the residual, c_strips[s].
    """
    c = c_strips.index(s)
    cols = n + s * STRIP + gl.arange(0, STRIP, layout=gl.SliceLayout(0, acc.type.layout))
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
        acc = gl.fma(ks[:, None], wte, rs[:, None] * acc)  # rounded as classifier.py's kernel does
    c.store(acc.to(gl.bfloat16))


@gluon.jit
def _compute(
    out_desc, b_ptr, res_desc, rs_ptr, ks_ptr, targets_ptr, wte_ptr, a_bufs, w_bufs, w_strip_bufs, c_strips,
    full, empty, c_full, c_empty, M, N, K, W_T: gl.constexpr,
):  # fmt: skip
    ADD: gl.constexpr = res_desc is not None
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, WIDTH), gl.num_programs(0)):
        m, n = corner(tile, M, N, WIDTH)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        strip = gl.zeros([BLOCK_M, STRIP], gl.float32, STRIP_LAYOUT)
        acc, strip = _multiply(acc, strip, step, a_bufs, w_bufs, w_strip_bufs, full, False, W_T)
        step += 1
        if ADD:
            tma.store_wait(0)
            mbarrier.arrive(c_empty, count=1)
        for _ in range(1, gl.cdiv(K, BLOCK_K)):
            acc, strip = _multiply(acc, strip, step, a_bufs, w_bufs, w_strip_bufs, full, True, W_T)
            # this step's two products may go on; the last step's are done, and its blocks free
            acc, strip = warpgroup_mma_wait(2, deps=(acc, strip))
            acc = warpgroup_mma_init(acc)
            strip = warpgroup_mma_init(strip)
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        acc, strip = warpgroup_mma_wait(0, deps=(acc, strip))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if ADD:
            mbarrier.wait(c_full, turn & 1)
        else:
            tma.store_wait(0)
        first, second, third, fourth = quarters(acc)
        _finish(first, 0, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_strips, m, n, M, N)
        _finish(second, 1, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_strips, m, n, M, N)
        _finish(third, 2, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_strips, m, n, M, N)
        _finish(fourth, 3, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_strips, m, n, M, N)
        _finish(strip, 4, b_ptr, ADD, rs_ptr, ks_ptr, targets_ptr, wte_ptr, c_strips, m, n, M, N)
        fence_async_shared()
        for s in range(STRIPS):
            tma_store(out_desc, [m, n + s * STRIP], c_strips.index(s))
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _wide_kernel(
    out_desc, a_desc, w_desc, w_strip_desc, b_ptr, res_desc, rs_ptr, ks_ptr, targets_ptr, wte_ptr, M, N, K,
    W_T: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    w_strip_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_strip_desc.block_type.shape, w_strip_desc.layout)
    c_strips = gl.allocate_shared_memory(gl.bfloat16, [STRIPS, BLOCK_M, STRIP], out_desc.layout)
    full = barriers(STAGES)
    empty = barriers(STAGES)
    c_full = barriers(1).index(0)
    c_empty = barriers(1).index(0)
    # fmt: off
    gl.warp_specialize([
        (_compute, (out_desc, b_ptr, res_desc, rs_ptr, ks_ptr, targets_ptr, wte_ptr, a_bufs, w_bufs, w_strip_bufs,
                    c_strips, full, empty, c_full, c_empty, M, N, K, W_T)),
        (_load, (a_desc, w_desc, w_strip_desc, res_desc, a_bufs, w_bufs, w_strip_bufs, c_strips,
                 full, empty, c_full, c_empty, M, N, K, W_T)),
    ], [1], [24])
    # fmt: on


def is_faster(M: int, N: int) -> bool:
    """Do tiles of 320 columns take less time than tiles of 256?  By the columns that a multiprocessor goes through, one
    wave of tiles after another; rows are the same for both.
    """

    def columns(width: int) -> int:
        return width * triton.cdiv(triton.cdiv(M, TILE_M) * triton.cdiv(N, width), num_sms())

    return columns(WIDTH.value) < 0.93 * columns(TILE_N)  # where there are as many, 320 take up to 7% longer


def _launch(
    out: Tensor, a: Tensor, w: Tensor, b: Tensor | None = None, *, w_is_nk: bool, res: Tensor | None = None,
    rs: Tensor | None = None, ks: Tensor | None = None, targets: Tensor | None = None, wte: Tensor | None = None,
) -> None:  # fmt: skip
    (M, K), N, strip, k = a.shape, out.shape[1], STRIP.value, BLOCK_K.value
    w_desc, w_strip_desc = (describe(w, c, k) if w_is_nk else describe(w, k, c) for c in (TILE_N, strip))
    programs = min(num_sms(), triton.cdiv(M, TILE_M) * triton.cdiv(N, WIDTH.value))
    _wide_kernel[(programs,)](
        describe(out, TILE_M, strip), describe(a, TILE_M, k), w_desc, w_strip_desc, b, describe(res, TILE_M, strip),
        rs, ks, targets, wte, M, N, K, W_T=w_is_nk, **OPTIONS,
    )  # fmt: skip


def matmul(out: Tensor, a: Tensor, w: Tensor, b: Tensor | None, *, w_is_nk: bool, res: Tensor | None) -> None:
    """out[M, N] = a[M, K] @ w (+ b) (+ res)."""
    _launch(out, a, w, b, w_is_nk=w_is_nk, res=res)


def classifier_dx(dln: Tensor, p: Tensor, wte: Tensor, rs: Tensor, ks: Tensor, targets: Tensor) -> None:
    """dln[R, C] = rs * (p[R, Vp] @ wte) + ks * wte[target]."""
    _launch(dln, p, wte, w_is_nk=False, rs=rs, ks=ks, targets=targets, wte=wte)
