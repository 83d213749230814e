"""Products of matmul.py, and the classifier's dX, in tiles of 128 x 320.

At some widths tiles of 320 columns waste less than tiles of 256: five cover 1558M's 1,600 columns.
A tile has two accumulators, of 256 columns and of a strip of 64: wgmma takes at most 256 columns,
and Triton's shapes are powers of two.  Both are summed in the order of matmul.py, to the same bits.
Blocks are half as deep, so that five stages and the tile to be stored fit into shared memory.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gpt2_triton.kernels.device_math import scale_and_add_target
from gpt2_triton.kernels.hopper.mainloop import load_partition
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    LAYOUT,
    OPTIONS,
    TILE_M,
    TILE_N,
    WIDE_N,
    Operands,
    barriers,
    channel,
    corner,
    describe,
    issue_mma,
    mma_loop,
    quarters,
    tiles,
    tma_store,
)
from gpt2_triton.kernels.tuning import programs

WIDTH = gl.constexpr(WIDE_N)
# columns of the second accumulator, and of what is stored at once
STRIP = gl.constexpr(WIDE_N - TILE_N)
STRIPS = gl.constexpr(WIDTH.value // STRIP.value)
STRIP_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, STRIP.value, 16]))
BLOCK_K = gl.constexpr(32)
STAGES = gl.constexpr(5)


@gluon.jit
def finish_strip(acc, s, b_ptr, ADD: gl.constexpr, head, c, m, n, M, N):
    """Add bias and residual to 64 columns, or apply the classifier's factors, head = (rs, ks,
    targets, wte).  Store the result in c, in the place of the residual.
    """
    strip = c.buf.index(s)
    cols = n + s * STRIP + gl.arange(0, STRIP, layout=gl.SliceLayout(0, acc.type.layout))
    if b_ptr is not None:
        acc += gl.load(b_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
    if ADD:
        acc += strip.load(acc.type.layout).to(gl.float32)
    if head[0] is not None:
        rows = m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, acc.type.layout))
        rs = gl.load(head[0] + rows, mask=rows < M, other=0.0)
        ks = gl.load(head[1] + rows, mask=rows < M, other=0.0)
        target = gl.load(head[2] + rows, mask=rows < M, other=-1).to(gl.int64)
        acc = scale_and_add_target(acc, rs, ks, target, head[3], cols, N)
    strip.store(acc.to(gl.bfloat16))


@gluon.jit
def wide_partition(out_desc, b_ptr, ADD: gl.constexpr, head, ring, c, M, N, K, W_T: gl.constexpr):
    """Multiply tiles in two accumulators, finish and store them strip by strip."""
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, WIDTH), gl.num_programs(0)):
        m, n = corner(tile, M, N, WIDTH)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        strip = gl.zeros([BLOCK_M, STRIP], gl.float32, STRIP_LAYOUT)
        accs = issue_mma((acc, strip), ring, step, False, False, W_T)
        if ADD:
            tma.store_wait(0)
            mbarrier.arrive(c.empty, count=1)
        accs, step = mma_loop(accs, ring, step + 1, gl.cdiv(K, BLOCK_K), False, W_T)
        if ADD:
            mbarrier.wait(c.full, turn & 1)
        else:
            tma.store_wait(0)
        strips = quarters(accs[0]) + (accs[1],)
        for s in gl.static_range(STRIPS):
            finish_strip(strips[s], s, b_ptr, ADD, head, c, m, n, M, N)
        fence_async_shared()
        for s in range(STRIPS):
            tma_store(out_desc, [m, n + s * STRIP], c.buf.index(s))
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _wide_kernel(
    out_desc, a_desc, w_desc, w_strip_desc, b_ptr, res_desc, rs_ptr, ks_ptr, targets_ptr, wte_ptr,
    M, N, K, W_T: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES] + w_desc.block_type.shape, w_desc.layout
    )
    w_strip_bufs = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES] + w_strip_desc.block_type.shape, w_strip_desc.layout
    )
    c_strips = gl.allocate_shared_memory(gl.bfloat16, [STRIPS, BLOCK_M, STRIP], out_desc.layout)
    ring = Operands(a_bufs, (w_bufs, w_strip_bufs), barriers(STAGES), barriers(STAGES))
    c = channel(c_strips, res_desc is not None)
    ADD: gl.constexpr = res_desc is not None
    head = (rs_ptr, ks_ptr, targets_ptr, wte_ptr)
    w_descs = (w_desc, w_strip_desc)
    # fmt: off
    gl.warp_specialize([
        (wide_partition, (out_desc, b_ptr, ADD, head, ring, c, M, N, K, W_T)),
        (load_partition, (a_desc, w_descs, res_desc, ring, c, M, N, K, WIDTH, W_T)),
    ], [1], [24])
    # fmt: on


def _launch(
    out: Tensor, a: Tensor, w: Tensor, b: Tensor | None = None, *, w_is_nk: bool,
    res: Tensor | None = None, rs: Tensor | None = None, ks: Tensor | None = None,
    targets: Tensor | None = None, wte: Tensor | None = None,
) -> None:  # fmt: skip
    M, K = a.shape
    N = out.shape[1]
    strip = STRIP.value
    k = BLOCK_K.value
    w_desc, w_strip_desc = (
        describe(w, c, k) if w_is_nk else describe(w, k, c) for c in (TILE_N, strip)
    )
    _wide_kernel[(programs(triton.cdiv(M, TILE_M) * triton.cdiv(N, WIDE_N)),)](
        describe(out, TILE_M, strip), describe(a, TILE_M, k), w_desc, w_strip_desc, b,
        describe(res, TILE_M, strip), rs, ks, targets, wte, M, N, K, W_T=w_is_nk, **OPTIONS,
    )  # fmt: skip


def matmul(
    out: Tensor, a: Tensor, w: Tensor, b: Tensor | None, *, w_is_nk: bool, res: Tensor | None
) -> int:
    """Write out[M, N] = a[M, K] @ w (+ b) (+ res); return the number of rows of tiles."""
    _launch(out, a, w, b, w_is_nk=w_is_nk, res=res)
    return triton.cdiv(len(a), TILE_M)


def classifier_dx(
    dln: Tensor, p: Tensor, wte: Tensor, rs: Tensor, ks: Tensor, targets: Tensor
) -> None:
    """Write dln[R, C] = rs * (p[R, Vp] @ wte) + ks * wte[target]."""
    _launch(dln, p, wte, w_is_nk=False, rs=rs, ks=ks, targets=targets, wte=wte)
