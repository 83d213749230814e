"""Partitions of the forward products and dX: one loads the operands, one multiplies
them and finishes the tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    LAYOUT,
    corner,
    issue_mma,
    load_blocks,
    mma_loop,
    tiles,
    tma_load,
    tma_store,
    wait_empty,
)
from gpt2_triton.kernels.hopper.rope import rotated_before, rotation


@gluon.jit
def load_partition(
    a_desc, w_descs, res_desc, ring, c, M, N, K, WIDTH: gl.constexpr, W_T: gl.constexpr
):
    """Load blocks of a and w, tile after tile, and if there is a residual, its tiles into c.  WIDTH
    is the width of a tile: the sum of w's one or two blocks.
    """
    STAGES: gl.constexpr = ring.a.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, WIDTH), gl.num_programs(0)):
        m, n = corner(tile, M, N, WIDTH)
        for k in range(0, K, BLOCK_K):
            load_blocks(a_desc, w_descs, ring, step, m, n, k, False, W_T)
            step += 1
            if res_desc is not None:
                # the multiplying partition empties c when it begins this tile, after its store of
                # the tile before.  So waiting some steps into the tile costs nothing, and the
                # steps that remain hide the load
                if k == min(STAGES, gl.cdiv(K, BLOCK_K) - 1) * BLOCK_K:
                    mbarrier.wait(c.empty, turn & 1)
                    load_residual(res_desc, c, m, n)
        turn += 1


@gluon.jit
def gated_load_partition(a_desc, w_desc, ring, M, N, K):
    """Load blocks of a, and of w the rows of gates and those of values: the halves of a tile."""
    STAGES: gl.constexpr = ring.a.shape[0]
    HALF: gl.constexpr = BLOCK_N // 2
    step = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        for k in range(0, K, a_desc.block_type.shape[1]):
            wait_empty(ring.empty, step, STAGES)
            stage = step % STAGES
            full = ring.full.index(stage)
            mbarrier.expect(full, a_desc.block_type.nbytes + 2 * w_desc.block_type.nbytes)
            tma_load(a_desc, [m, k], full, ring.a.index(stage))
            w = ring.w[0].index(stage)
            tma_load(w_desc, [n // 2, k], full, w.slice(0, HALF, 0))
            tma_load(w_desc, [(N + n) // 2, k], full, w.slice(HALF, HALF, 0))
            step += 1


@gluon.jit
def load_residual(res_desc, c, m, n):
    """Load a tile of the residual into c: one block, or several in order down the
    tile and then to the right.
    """
    if len(c.buf.shape) == 2:
        mbarrier.expect(c.full, res_desc.block_type.nbytes)
        tma_load(res_desc, [m, n], c.full, c.buf)
    else:
        BLOCKS: gl.constexpr = c.buf.shape[0]
        HEIGHT: gl.constexpr = res_desc.block_type.shape[0]
        WIDTH: gl.constexpr = res_desc.block_type.shape[1]
        DOWN: gl.constexpr = BLOCK_M // HEIGHT
        mbarrier.expect(c.full, BLOCKS * res_desc.block_type.nbytes)
        for s in range(BLOCKS):
            at = [m + s % DOWN * HEIGHT, n + s // DOWN * WIDTH]
            tma_load(res_desc, at, c.full, c.buf.index(s))


@gluon.jit
def compute_partition(
    out_desc, b_ptr, res_desc, rope, ring, c, M, N, K, W_T: gl.constexpr,
    TO_ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Multiply, add bias and residual, and store the tile, or with TO_ACTIVATION pass it on
    through c.  Norm and rotate heads if `rope`, RopeArguments, has a w and a table.
    """
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT)
        accs = issue_mma((zeros,), ring, step, False, False, W_T)
        # while the first product runs
        if b_ptr is not None:
            cols = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
            b = gl.load(b_ptr + cols, mask=cols < N, other=0.0)
        EARLY: gl.constexpr = rope.w is None or rope.HS == 64
        if rope.table is not None and EARLY:
            cos, sin = rotation(zeros, rope.table, m, rope.T, rope.HS)
        if res_desc is not None:
            tma.store_wait(0)
            mbarrier.arrive(c.empty, count=1)
        acc, step = mma_loop(accs, ring, step + 1, gl.cdiv(K, ring.a.shape[2]), False, W_T)
        if b_ptr is not None:
            acc += b.to(gl.float32)[None, :]
        if rope.table is not None:
            if not EARLY:  # registers would not hold them beside the sums and a norm
                cos, sin = rotation(acc, rope.table, m, rope.T, rope.HS)
            acc = rotated_before(acc, 1.0, cos, sin, m, n, M, rope)
        if TO_ACTIVATION:
            mbarrier.wait(c.empty, (turn & 1) ^ 1)
        elif res_desc is not None:
            mbarrier.wait(c.full, turn & 1)
            acc += c.buf.load(LAYOUT).to(gl.float32)
        else:
            tma.store_wait(0)
        c.buf.store(acc.to(gl.bfloat16))
        fence_async_shared()
        if TO_ACTIVATION:
            mbarrier.arrive(c.full, count=1)
        else:
            tma_store(out_desc, [m, n], c.buf)
        turn += 1
    tma.store_wait(0)
