"""Forward products and dX of fp8 operands for Hopper: out = a[M, K] @ w[N, K].T /
scales + b (+ res), in bf16.

Tensor cores add 32 fp8 products to the sum so far, and cut all terms 14 bits below the largest
term's first bit.  The cut biases long sums of one sign: by 17% over 65,536 terms if an operand's
mean is half its standard deviation.  So partial sums of 128 terms are added in fp32, in dW and the
head's dX of 256.  Each of two warpgroups computes 64 x 256 of a tile, in two halves: while one
warpgroup adds a half, the other multiplies.
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
    warpgroup_mma_wait,
)

from gpt2_triton.kernels.epilogue import NO_ROPE, RopeArguments
from gpt2_triton.kernels.hopper.mainloop import load_partition
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    STAGES,
    TILE_M,
    TILE_N,
    Operands,
    barriers,
    channel,
    corner,
    describe,
    tiles,
    tma_store,
    wait_full,
)
from gpt2_triton.kernels.hopper.rope import rotated_before, rotation
from gpt2_triton.kernels.tuning import programs

TILE_K = 128
BLOCK_K = gl.constexpr(TILE_K)
HALF = gl.constexpr(TILE_N // 2)
ROWS_OF_GROUP = gl.constexpr(TILE_M // 2)
# of an accumulator
HALF_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 32]))
OPTIONS = dict(num_warps=4, maxnreg=168)


@gluon.jit
def unscale_of(a_scale_ptr, w_scale_ptr):
    return 1.0 / (gl.load(a_scale_ptr) * gl.load(w_scale_ptr))


@gluon.jit
def multiply(
    ring, step, GROUP: gl.constexpr, FIRST: gl.constexpr, DEEP: gl.constexpr, FREE: gl.constexpr
):
    """Return a @ w.T, fp32 [64, 128], of a's 64 rows from 64 * GROUP on and w's 128 rows from FIRST
    on, over DEEP stages.  With FREE, give each stage back when it has been read.
    """
    STAGES: gl.constexpr = ring.a.shape[0]
    part = gl.zeros([ROWS_OF_GROUP, HALF], gl.float32, HALF_LAYOUT)
    for i in gl.static_range(DEEP):
        stage = (step + i) % STAGES
        a = ring.a.index(stage).slice(ROWS_OF_GROUP * GROUP, ROWS_OF_GROUP, 0)
        w = ring.w[0].index(stage).slice(FIRST, HALF, 0).permute((1, 0))
        part = warpgroup_mma(a, w, part, use_acc=i > 0, is_async=True)
    for i in gl.static_range(DEEP):
        if FREE or i == DEEP - 1:
            part = warpgroup_mma_wait(DEEP - 1 - i, deps=(part,))
        if FREE:
            mbarrier.arrive(ring.empty.index((step + i) % STAGES), count=1)
    return part


@gluon.jit
def multiply_in_parts(ring, step, count, whole, GROUP: gl.constexpr, DEEP: gl.constexpr):
    """Multiply `count` steps of 128 columns of a and w, and free their stages.  Sums over
    DEEP steps are added in fp32.

    Returns the left and right half, fp32 [64, 128], of a tile's 64 rows from 64 *
    GROUP on, and the next step.
    The right half of a tile that is not `whole` lies outside of the matrix:
    it is 0, and not multiplied.
    """
    STAGES: gl.constexpr = ring.a.shape[0]
    left = gl.zeros([ROWS_OF_GROUP, HALF], gl.float32, HALF_LAYOUT)
    right = gl.zeros([ROWS_OF_GROUP, HALF], gl.float32, HALF_LAYOUT)
    whole_steps = count if whole else 0
    for _ in range(0, whole_steps // DEEP):
        for i in gl.static_range(DEEP):
            wait_full(ring.full, step + i, STAGES)
        left += multiply(ring, step, GROUP, 0, DEEP, False)
        right += multiply(ring, step, GROUP, HALF, DEEP, True)
        step += DEEP
    for _ in range(0, whole_steps % DEEP):
        wait_full(ring.full, step, STAGES)
        left += multiply(ring, step, GROUP, 0, 1, False)
        right += multiply(ring, step, GROUP, HALF, 1, True)
        step += 1
    for _ in range(whole_steps, count):
        wait_full(ring.full, step, STAGES)
        left += multiply(ring, step, GROUP, 0, 1, True)
        step += 1
    return left, right, step


@gluon.jit
def fp8_partition(
    out_desc, b_ptr, ADD: gl.constexpr, rope, scales, ring, c, M, N, K, GROUP: gl.constexpr
):
    """Multiply a warpgroup's part of the tiles, scale back, add bias and residual, and store it.
    `rope` is as in mainloop.compute_partition.
    """
    a_scale_ptr, w_scale_ptr = scales
    unscale = unscale_of(a_scale_ptr, w_scale_ptr)
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        if ADD:
            tma.store_wait(0)
            mbarrier.arrive(c.empty, count=1)
        left, right, step = multiply_in_parts(
            ring, step, gl.cdiv(K, BLOCK_K), n + HALF < N, GROUP, 1
        )
        row = m + ROWS_OF_GROUP * GROUP
        # once for both halves, if registers hold it
        ONCE: gl.constexpr = rope.w is None or rope.HS == 64
        if rope.table is not None and ONCE:
            cos, sin = rotation(left, rope.table, row, rope.T, rope.HS)
        if ADD:
            mbarrier.wait(c.full, turn & 1)
        else:
            tma.store_wait(0)
        sums = left, right
        for half in gl.static_range(2):
            acc = sums[half]
            if rope.table is not None:
                if not ONCE:
                    cos, sin = rotation(acc, rope.table, row, rope.T, rope.HS)
                acc = rotated_before(acc, unscale, cos, sin, row, n + half * HALF, M, rope)
            else:
                acc *= unscale
            if b_ptr is not None:
                cols = n + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, HALF_LAYOUT))
                acc += gl.load(b_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
            buf = c.buf.index(2 * half + GROUP)
            if ADD:
                acc += buf.load(HALF_LAYOUT).to(gl.float32)
            buf.store(acc.to(gl.bfloat16))
            fence_async_shared()
            tma_store(out_desc, [row, n + half * HALF], buf)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize_on_alignment=["a_scale_ptr", "w_scale_ptr"])
def _fp8_kernel(
    out_desc, a_desc, w_desc, b_ptr, res_desc, a_scale_ptr, w_scale_ptr, M, N, K, rope
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    c_bufs = gl.allocate_shared_memory(gl.bfloat16, [4, ROWS_OF_GROUP, HALF], out_desc.layout)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES, 2))
    c = channel(c_bufs, res_desc is not None, 2)
    ADD: gl.constexpr = res_desc is not None
    scales = (a_scale_ptr, w_scale_ptr)
    # fmt: off
    gl.warp_specialize([
        (fp8_partition, (out_desc, b_ptr, ADD, rope, scales, ring, c, M, N, K, 0)),
        (fp8_partition, (out_desc, b_ptr, ADD, rope, scales, ring, c, M, N, K, 1)),
        (load_partition, (a_desc, (w_desc,), res_desc, ring, c, M, N, K, BLOCK_N, True)),
    ], [4, 1], [240, 24])
    # fmt: on


def matmul(
    out: Tensor, a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, b: Tensor | None,
    res: Tensor | None, rope: RopeArguments = NO_ROPE,
) -> int:  # fmt: skip
    """Write out[M, N] = a[M, K] @ w[N, K].T / (a_scale * w_scale) (+ b) (+ res), and norm and
    rotate heads as `rope` says; return the number of rows of tiles.
    """
    M, K = a.shape
    N = w.shape[0]
    rows = ROWS_OF_GROUP.value
    columns = HALF.value
    tiles = triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N)
    _fp8_kernel[(programs(tiles),)](
        describe(out, rows, columns), describe(a, TILE_M, TILE_K), describe(w, TILE_N, TILE_K), b,
        describe(res, rows, columns), a_scale, w_scale, M, N, K, rope, **OPTIONS,
    )  # fmt: skip
    return triton.cdiv(M, TILE_M)
