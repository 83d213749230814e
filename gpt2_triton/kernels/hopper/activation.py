"""Partitions that apply GELU or its derivative to a tile while
compute_partition multiplies the next.

A tile is read in slices of SLICE_M x SLICE_N, 32 numbers for each thread of two warps: down
the first SLICE_N columns, then down the next.  The load of slice s + 1 is issued before
slice s is used, so that the arithmetic hides shared memory's latency.  The registers of two
slices limit a slice's size.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from gpt2_triton.kernels.device_math import dgelu_of, gelu_u, swiglu
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    corner,
    tiles,
    tma_load,
    tma_store,
    wait_empty,
    wait_full,
)

SLICE_M = gl.constexpr(32)
SLICE_N = gl.constexpr(64)
DOWN = gl.constexpr(BLOCK_M.value // SLICE_M.value)
SLICES = gl.constexpr(DOWN.value * (BLOCK_N.value // SLICE_N.value))
RING = gl.constexpr(4)  # slices of pre in flight
# of a slice, in a partition of two warps
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))


# gelu and dgelu of device_math.py for outputs in bf16, with sigmoid(2u) = 0.5 + 0.5 * tanh(u).  One
# instruction approximates tanh to 2^-11 of its value, where bf16's half ulp is 2^-9.  Errors
# against float64 are the same to four digits (docs/LOG.md).  sigmoid's two instructions would not
# hide behind the next product.


@gluon.jit
def fast_sigmoid_2u(x, xx):
    u = gelu_u(x, xx)
    t = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=gl.float32, is_pure=True, pack=1
    )
    return t * 0.5 + 0.5


@gluon.jit
def fast_gelu(x):
    return x * fast_sigmoid_2u(x, x * x)


@gluon.jit
def fast_dgelu(x):
    xx = x * x
    return dgelu_of(x, xx, fast_sigmoid_2u(x, xx))


@gluon.jit
def store_slice(ptr, at, value, m, n, M, N):
    """Store a slice, which is inside or outside as a whole: M is a multiple of
    SLICE_M and N of SLICE_N.
    """
    if (m < M) & (n < N):
        gl.store(ptr + (m.to(gl.int64) * N + n) + at, value.to(gl.bfloat16))


@gluon.jit
def slice_offsets(N):
    """Return the columns of a slice, and its elements' offsets in a matrix of N columns."""
    cols = gl.arange(0, SLICE_N, layout=gl.SliceLayout(0, LAYOUT))
    rows = gl.arange(0, SLICE_M, layout=gl.SliceLayout(1, LAYOUT))
    return cols, rows[:, None] * N + cols[None, :]


@gluon.jit
def activation_partition(out_ptr, pre_desc, c, c_slices, M, N):
    """Store each tile, which is pre, and its gelu."""
    _, at = slice_offsets(N)
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        mbarrier.wait(c.full, turn & 1)
        tma_store(pre_desc, [m, n], c.buf)
        next_pre = c_slices.index(0).load(LAYOUT)
        for s in range(SLICES):
            row = m + s % DOWN * SLICE_M
            col = n + s // DOWN * SLICE_N
            pre = next_pre.to(gl.float32)
            next_pre = c_slices.index(min(s + 1, SLICES - 1)).load(LAYOUT)
            store_slice(out_ptr, at, fast_gelu(pre), row, col, M, N)
        tma.store_wait(0)
        mbarrier.arrive(c.empty, count=1)
        turn += 1


@gluon.jit
def swiglu_partition(out_ptr, pre_desc, c, c_slices, M, N):
    """Store each tile, gates and values, and the swiglu of its halves."""
    HALF: gl.constexpr = BLOCK_N // 2
    _, at = slice_offsets(N // 2)
    halves = c_slices.reinterpret(gl.bfloat16, [2, BLOCK_M, HALF], pre_desc.layout)
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        n = n // 2
        mbarrier.wait(c.full, turn & 1)
        tma_store(pre_desc, [m, n], halves.index(0))
        tma_store(pre_desc, [m, N // 2 + n], halves.index(1))
        for s in range(SLICES // 2):
            g = c_slices.index(s).load(LAYOUT).to(gl.float32)
            u = c_slices.index(SLICES // 2 + s).load(LAYOUT).to(gl.float32)
            row = m + s % DOWN * SLICE_M
            col = n + s // DOWN * SLICE_N
            store_slice(out_ptr, at, swiglu(g, u), row, col, M, N // 2)
        tma.store_wait(0)
        mbarrier.arrive(c.empty, count=1)
        turn += 1


@gluon.jit
def preactivation_partition(pre_desc, pre, M, N):
    """Load the slices of pre in the order in which derivative_partition takes them."""
    step = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        for s in range(SLICES):
            wait_empty(pre.empty, step, RING)
            slot = step % RING
            mbarrier.expect(pre.full.index(slot), pre_desc.block_type.nbytes)
            at = [m + s % DOWN * SLICE_M, n + s // DOWN * SLICE_N]
            tma_load(pre_desc, at, pre.full.index(slot), pre.buf.index(slot))
            step += 1


@gluon.jit
def take_pre(pre, step):
    """Return the slice of pre of this step, and free its slot."""
    wait_full(pre.full, step, RING)
    slot = step % RING
    value = pre.buf.index(slot).load(LAYOUT)
    mbarrier.arrive(pre.empty.index(slot), count=1)
    return value


@gluon.jit
def derivative_partition(out_ptr, gelu_ptr, part_ptr, pre, c, c_slices, M, N):
    """Store dpre = c * gelu'(pre) of each tile, its column sums to part[tile_m], and gelu(pre) if
    gelu_ptr is given.  c is the gradient of gelu(pre).  gelu_ptr may be pre's address: a slice of
    pre is read before it is overwritten.
    """
    cols, at = slice_offsets(N)
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        mbarrier.wait(c.full, turn & 1)
        next_pre = take_pre(pre, step)
        sums = gl.zeros([8, SLICE_N], gl.float32, LAYOUT)
        next_c = c_slices.index(0).load(LAYOUT)
        for s in range(SLICES):
            row = m + s % DOWN * SLICE_M
            col = n + s // DOWN * SLICE_N
            dgelu_out = next_c.to(gl.float32)
            next_c = c_slices.index(min(s + 1, SLICES - 1)).load(LAYOUT)
            x = next_pre.to(gl.float32)
            step += 1
            if s + 1 < SLICES:
                next_pre = take_pre(pre, step)
            dpre = dgelu_out * fast_dgelu(x)
            store_slice(out_ptr, at, dpre, row, col, M, N)
            if gelu_ptr is not None:
                store_slice(gelu_ptr, at, fast_gelu(x), row, col, M, N)
            # one thread holds every eighth row; rows past the end are 0
            eights = gl.reshape(dpre, [SLICE_M // 8, 8, SLICE_N])
            sums += gl.convert_layout(gl.sum(eights, 0), LAYOUT)
            if s % DOWN == DOWN - 1:
                if col < N:
                    gl.store(part_ptr + m // BLOCK_M * N + col + cols, gl.sum(sums, 0))
                sums = gl.zeros([8, SLICE_N], gl.float32, LAYOUT)
        mbarrier.arrive(c.empty, count=1)
        turn += 1
