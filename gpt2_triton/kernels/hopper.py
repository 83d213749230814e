"""The products of matmul.py for Hopper, in Gluon: warps with different work, running at the same time.

compute    two warpgroups multiply tiles of 128 x 256 with wgmma, one product always in flight
load       one warp keeps STAGES pairs of blocks on their way by TMA, tile after tile, and never waits for an epilogue
activate   two warps apply GELU or its derivative to the tile just finished while compute multiplies the next
load_pre   one warp brings what the derivative is taken of, some slices ahead of activate

They meet at mbarriers in shared memory: `full` and `empty` for each stage of the operands, for the tile c that compute
hands on (or, for the residual add, receives), and for the ring of pre's slices.  Wait number i of a barrier passes once
the barrier has completed phase i, told apart by parity; a first wait for `empty` passes at once, its parity being that
of a phase before the first.  What a tile holds is the same whichever program computes it, and has one writer.

Registers decide the shape.  An accumulator of 128 x 256 takes 128 of each compute thread's; a kernel of 12 warps starts
with 168 for each thread, and warpgroups trade them (setmaxnreg): the two of compute take what the others leave.

What compute hands on is rounded to bf16: gelu'(pre) meets a product that has been rounded once, as in PyTorch.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpt2_triton.kernels.gelu import dgelu, gelu
from gpt2_triton.kernels.softmax import unnormalised
from gpt2_triton.kernels.tuned import num_sms

# what Triton calls them now, or called them in 3.6
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
if not hasattr(gl.shared_memory_descriptor, "reinterpret"):
    gl.shared_memory_descriptor.reinterpret = gl.shared_memory_descriptor._reinterpret

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(64)
GROUP_M = gl.constexpr(8)
STAGES = gl.constexpr(3)
DW_STAGES = gl.constexpr(4)  # room for one more: dw has no tile c
ROWS = gl.constexpr(32)  # a slice of a tile is ROWS x 64: 32 numbers for each thread of activate
DOWN = gl.constexpr(BLOCK_M.value // ROWS.value)
SLICES = gl.constexpr(DOWN.value * (BLOCK_N.value // 64))
RING = gl.constexpr(4)


@gluon.jit
def _tiles(M, N):
    return gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)


@gluon.jit
def _corner(tile, M, N):
    """First row and column of a tile: bands of GROUP_M rows of tiles, each walked column by column (tile.py)."""
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    band = GROUP_M * tiles_n
    first = tile // band * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return (first + tile % band % height) * BLOCK_M, tile % band // height * BLOCK_N


@gluon.jit
def _barriers(n: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def _await_empty(empty, step, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)


@gluon.jit
def _multiply(acc, step, a_bufs, w_bufs, full, use_acc, A_T: gl.constexpr, W_T: gl.constexpr, STAGES: gl.constexpr):
    """Start acc (+)= a @ w for the blocks of this step once they are there; A_T, W_T: stored transposed."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    a = a_bufs.index(stage)
    w = w_bufs.index(stage)
    if A_T:
        a = a.permute((1, 0))
    if W_T:
        w = w.permute((1, 0))
    return warpgroup_mma(a, w, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _multiply_rest(
    acc, step, steps, a_bufs, w_bufs, full, empty, A_T: gl.constexpr, W_T: gl.constexpr, STAGES: gl.constexpr
):
    """The products of a tile after its first; each, once started, waits for the one before and frees its blocks."""
    for _ in range(1, steps):
        acc = _multiply(acc, step, a_bufs, w_bufs, full, True, A_T, W_T, STAGES)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    out = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return out, step


# ---- forward and dX: out[M, N] = epilogue(a[M, K] @ w), w stored as [N, K] (W_T) or as [K, N] ----


@gluon.jit
def _load(
    a_desc, w_desc, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K, W_T: gl.constexpr
):  # fmt: skip
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), _tiles(M, N), gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        for k in range(0, K, BLOCK_K):
            _await_empty(empty, step, STAGES)
            stage = step % STAGES
            mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + w_desc.block_type.nbytes)
            _tma_load(a_desc, [m, k], full.index(stage), a_bufs.index(stage))
            if W_T:
                _tma_load(w_desc, [n, k], full.index(stage), w_bufs.index(stage))
            else:
                _tma_load(w_desc, [k, n], full.index(stage), w_bufs.index(stage))
            step += 1
            if res_desc is not None:
                # not before compute has begun this tile, and so stored the last; early enough to hide
                if k == min(STAGES, gl.cdiv(K, BLOCK_K) - 1) * BLOCK_K:
                    mbarrier.wait(c_empty, turn & 1)
                    mbarrier.expect(c_full, res_desc.block_type.nbytes)
                    _tma_load(res_desc, [m, n], c_full, c_buf)
        turn += 1


@gluon.jit
def _compute(
    out_desc, b_ptr, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K,
    W_T: gl.constexpr, HAND_ON: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), _tiles(M, N), gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        acc = _multiply(acc, step, a_bufs, w_bufs, full, False, False, W_T, STAGES)
        # while the first product runs
        if b_ptr is not None:
            cols = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            b = gl.load(b_ptr + cols, mask=cols < N, other=0.0)
        if res_desc is not None:
            tma.store_wait(0)
            mbarrier.arrive(c_empty, count=1)
        steps = gl.cdiv(K, BLOCK_K)
        acc, step = _multiply_rest(acc, step + 1, steps, a_bufs, w_bufs, full, empty, False, W_T, STAGES)
        if b_ptr is not None:
            acc += b.to(gl.float32)[None, :]
        if HAND_ON:
            mbarrier.wait(c_empty, (turn & 1) ^ 1)
        elif res_desc is not None:
            mbarrier.wait(c_full, turn & 1)
            acc += c_buf.load(layout).to(gl.float32)
        else:
            tma.store_wait(0)
        c_buf.store(acc.to(gl.bfloat16))
        fence_async_shared()
        if HAND_ON:
            mbarrier.arrive(c_full, count=1)
        else:
            _tma_store(out_desc, [m, n], c_buf)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _load_pre(pre_desc, ring, ring_full, ring_empty, M, N):
    """Slices in the order in which _activate takes them: down 64 columns of the tile, then down the next 64."""
    step = 0
    for tile in range(gl.program_id(0), _tiles(M, N), gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        for s in range(SLICES):
            _await_empty(ring_empty, step, RING)
            slot = step % RING
            mbarrier.expect(ring_full.index(slot), pre_desc.block_type.nbytes)
            _tma_load(pre_desc, [m + s % DOWN * ROWS, n + s // DOWN * 64], ring_full.index(slot), ring.index(slot))
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
    for tile in range(gl.program_id(0), _tiles(M, N), gl.num_programs(0)):
        m, n = _corner(tile, M, N)
        mbarrier.wait(c_full, turn & 1)
        if not DGELU:
            _tma_store(pre_desc, [m, n], c_buf)
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
    full = _barriers(STAGES)
    empty = _barriers(STAGES)
    c_full = _barriers(1).index(0)
    c_empty = _barriers(1).index(0)
    # fmt: off
    if DGELU:
        ring = gl.allocate_shared_memory(gl.bfloat16, [RING, ROWS, 64], pre_desc.layout)
        ring_full = _barriers(RING)
        ring_empty = _barriers(RING)
        gl.warp_specialize([
            (_compute, (out_desc, b_ptr, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty,
                        M, N, K, W_T, True)),
            (_activate, (out_ptr, pre_desc, gelu_ptr, part_ptr, c_buf, c_slices, ring, ring_full, ring_empty,
                         c_full, c_empty, M, N, True)),
            (_load, (a_desc, w_desc, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K, W_T)),
            (_load_pre, (pre_desc, ring, ring_full, ring_empty, M, N)),
        ], [2, 1, 1], [184, 184, 184])
    elif GELU:
        gl.warp_specialize([
            (_compute, (out_desc, b_ptr, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty,
                        M, N, K, W_T, True)),
            (_activate, (out_ptr, pre_desc, None, None, c_buf, c_slices, None, None, None,
                         c_full, c_empty, M, N, False)),
            (_load, (a_desc, w_desc, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K, W_T)),
        ], [2, 1], [104, 104])
    else:
        gl.warp_specialize([
            (_compute, (out_desc, b_ptr, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty,
                        M, N, K, W_T, False)),
            (_load, (a_desc, w_desc, res_desc, a_bufs, w_bufs, c_buf, full, empty, c_full, c_empty, M, N, K, W_T)),
        ], [1], [24])
    # fmt: on


# ---- dW: out[split, N, K] (+)= dout[rows].T @ inp[rows] ----


@gluon.jit
def _dw_load(dout_desc, inp_desc, a_bufs, w_bufs, full, empty, N, K, splits, steps):
    step = 0
    for item in range(gl.program_id(0), _tiles(N, K) * splits, gl.num_programs(0)):
        n, k = _corner(item % _tiles(N, K), N, K)
        first = item // _tiles(N, K) * steps  # the tiles of one split run together and share its rows in L2
        for s in range(first, first + steps):
            _await_empty(empty, step, DW_STAGES)
            stage = step % DW_STAGES
            mbarrier.expect(full.index(stage), dout_desc.block_type.nbytes + inp_desc.block_type.nbytes)
            _tma_load(dout_desc, [s * BLOCK_K, n], full.index(stage), a_bufs.index(stage))
            _tma_load(inp_desc, [s * BLOCK_K, k], full.index(stage), w_bufs.index(stage))
            step += 1


@gluon.jit
def _dw_compute(out_ptr, a_bufs, w_bufs, full, empty, N, K, splits, steps, ACC: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    step = 0
    for item in range(gl.program_id(0), _tiles(N, K) * splits, gl.num_programs(0)):
        n, k = _corner(item % _tiles(N, K), N, K)
        rows = n + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
        cols = k + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        at = (item // _tiles(N, K) * N + rows).to(gl.int64)[:, None] * K + cols[None, :]
        mask = (rows < N)[:, None] & (cols < K)[None, :]
        if ACC:
            acc = gl.load(out_ptr + at, mask=mask, other=0.0)
        else:
            acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        acc = _multiply(acc, step, a_bufs, w_bufs, full, ACC, True, False, DW_STAGES)
        acc, step = _multiply_rest(acc, step + 1, steps, a_bufs, w_bufs, full, empty, True, False, DW_STAGES)
        gl.store(out_ptr + at, acc, mask=mask)


@gluon.jit
def _dw_kernel(out_ptr, dout_desc, inp_desc, N, K, splits, steps, ACC: gl.constexpr):
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [DW_STAGES, BLOCK_K, BLOCK_M], dout_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [DW_STAGES, BLOCK_K, BLOCK_N], inp_desc.layout)
    full = _barriers(DW_STAGES)
    empty = _barriers(DW_STAGES)
    gl.warp_specialize(
        [
            (_dw_compute, (out_ptr, a_bufs, w_bufs, full, empty, N, K, splits, steps, ACC)),
            (_dw_load, (dout_desc, inp_desc, a_bufs, w_bufs, full, empty, N, K, splits, steps)),
        ],
        [1],
        [24],
    )


# ---- the classifier's p[R, Vp] and the row sums of each tile (classifier.py) ----


@gluon.jit
def _classifier_compute(p_desc, part_ptr, zt_ptr, targets_ptr, a_bufs, w_bufs, c_buf, full, empty, R, C, V, Vp):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    step = 0
    for tile in range(gl.program_id(0), _tiles(R, Vp), gl.num_programs(0)):
        m, n = _corner(tile, R, Vp)
        z = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        z = _multiply(z, step, a_bufs, w_bufs, full, False, False, True, STAGES)
        r = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
        j = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        zt = gl.load(zt_ptr + r, mask=r < R, other=0.0)
        target = gl.load(targets_ptr + r, mask=r < R, other=-1)
        steps = gl.cdiv(C, BLOCK_K)
        z, step = _multiply_rest(z, step + 1, steps, a_bufs, w_bufs, full, empty, False, True, STAGES)
        p = unnormalised(z, zt[:, None], (j < V)[None, :] & (j[None, :] != target[:, None]))
        gl.store(part_ptr + n // BLOCK_N * R + r, gl.sum(p, 1), mask=r < R)
        if p_desc is not None:
            tma.store_wait(0)
            c_buf.store(p.to(gl.bfloat16))
            fence_async_shared()
            _tma_store(p_desc, [m, n], c_buf)
    tma.store_wait(0)


@gluon.jit
def _classifier_kernel(p_desc, part_ptr, lnf_desc, wte_desc, zt_ptr, targets_ptr, R, C, V, Vp):
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], lnf_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, BLOCK_K], wte_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N], lnf_desc.layout)
    full = _barriers(STAGES)
    empty = _barriers(STAGES)
    gl.warp_specialize(
        [
            (
                _classifier_compute,
                (p_desc, part_ptr, zt_ptr, targets_ptr, a_bufs, w_bufs, c_buf, full, empty, R, C, V, Vp),
            ),
            (_load, (lnf_desc, wte_desc, None, a_bufs, w_bufs, c_buf, full, empty, None, None, R, Vp, C, True)),
        ],
        [1],
        [24],
    )


# ---- launchers ----


def _describe(tensor: Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return None if tensor is None else TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


_M, _N, _K = BLOCK_M.value, BLOCK_N.value, BLOCK_K.value
_OPTIONS = dict(num_warps=8, maxnreg=168)


def matmul(
    out: Tensor, a: Tensor, w: Tensor, b: Tensor | None, *, w_is_nk: bool, epilogue: str,
    res: Tensor | None, pre: Tensor | None, gelu_out: Tensor | None, part: Tensor | None,
) -> None:  # fmt: skip
    """out[M, N] = epilogue(a[M, K] @ w): what matmul.py's kernel does, and with its arguments."""
    (M, K), N = a.shape, out.shape[1]
    w_desc = _describe(w, _N, _K) if w_is_nk else _describe(w, _K, _N)
    pre_desc = _describe(pre, ROWS.value, 64) if epilogue == "dgelu" else _describe(pre, _M, _N)
    programs = min(num_sms(), triton.cdiv(M, _M) * triton.cdiv(N, _N))
    _matmul_kernel[(programs,)](
        out, _describe(out, _M, _N), _describe(a, _M, _K), w_desc, b, _describe(res, _M, _N), pre_desc, gelu_out, part,
        M, N, K, W_T=w_is_nk, GELU=epilogue == "gelu", DGELU=epilogue == "dgelu", **_OPTIONS,
    )  # fmt: skip


def matmul_dw(out: Tensor, dout: Tensor, inp: Tensor, splits: int, steps: int, acc: bool) -> None:
    """out[split, N, K] (+)= dout.T @ inp over the split's rows, `steps` blocks of BLOCK_K."""
    N, K = dout.shape[1], inp.shape[1]
    programs = min(num_sms(), triton.cdiv(N, _M) * triton.cdiv(K, _N) * splits)
    _dw_kernel[(programs,)](
        out, _describe(dout, _K, _M), _describe(inp, _K, _N), N, K, splits, steps, ACC=acc, **_OPTIONS
    )


def classifier_fwd(
    p: Tensor | None, part: Tensor, lnf: Tensor, wte: Tensor, zt: Tensor, targets: Tensor, V: int
) -> None:
    """p[R, Vp] and part[tile, R], the sums of its rows in each tile of BLOCK_N columns."""
    (R, C), Vp = lnf.shape, wte.shape[0]
    programs = min(num_sms(), triton.cdiv(R, _M) * triton.cdiv(Vp, _N))
    _classifier_kernel[(programs,)](
        _describe(p, _M, _N), part, _describe(lnf, _M, _K), _describe(wte, _N, _K), zt, targets, R, C, V, Vp, **_OPTIONS
    )
