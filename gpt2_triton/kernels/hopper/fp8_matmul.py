"""Forward products and dX of fp8 operands for Hopper: out = a[M, K] @ w[N, K].T / scales + b (+ res), in bf16.

The partitions are those of matmul.py.  Products are summed in the tensor cores' own precision, 14 bits aligned to the
largest term, which for K up to 6,400 costs less than the rounding of the output to bf16.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gpt2_triton.kernels.hopper.mainloop import load_partition
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    OPTIONS,
    STAGES,
    TILE_M,
    TILE_N,
    Channel,
    Operands,
    barriers,
    corner,
    describe,
    issue_mma,
    mma_loop,
    tiles,
    tma_store,
)
from gpt2_triton.kernels.tuning import programs

TILE_K = 128
BLOCK_K = gl.constexpr(TILE_K)
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N.value, 32]))  # of an accumulator


@gluon.jit
def unscale_of(a_scale_ptr, w_scale_ptr):
    return 1.0 / (gl.load(a_scale_ptr) * gl.load(w_scale_ptr))


@gluon.jit
def fp8_partition(out_desc, b_ptr, ADD: gl.constexpr, a_scale_ptr, w_scale_ptr, ring, c, M, N, K):
    """Multiply, scale back, add bias and residual, and store the tile."""
    unscale = unscale_of(a_scale_ptr, w_scale_ptr)
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        accs = (gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT),)
        accs = issue_mma(accs, ring, step, False, False, True)
        # while the first product runs
        if b_ptr is not None:
            cols = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
            b = gl.load(b_ptr + cols, mask=cols < N, other=0.0)
        if ADD:
            tma.store_wait(0)
            mbarrier.arrive(c.empty, count=1)
        acc, step = mma_loop(accs, ring, step + 1, gl.cdiv(K, BLOCK_K), False, True)
        acc = acc * unscale
        if b_ptr is not None:
            acc += b.to(gl.float32)[None, :]
        if ADD:
            mbarrier.wait(c.full, turn & 1)
            acc += c.buf.load(LAYOUT).to(gl.float32)
        else:
            tma.store_wait(0)
        c.buf.store(acc.to(gl.bfloat16))
        fence_async_shared()
        tma_store(out_desc, [m, n], c.buf)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _fp8_kernel(out_desc, a_desc, w_desc, b_ptr, res_desc, a_scale_ptr, w_scale_ptr, M, N, K):
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    c_buf = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N], out_desc.layout)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES))
    c = Channel(c_buf, barriers(1).index(0), barriers(1).index(0))
    # fmt: off
    gl.warp_specialize([
        (fp8_partition, (out_desc, b_ptr, res_desc is not None, a_scale_ptr, w_scale_ptr, ring, c, M, N, K)),
        (load_partition, (a_desc, (w_desc,), res_desc, ring, c, M, N, K, BLOCK_N, True)),
    ], [1], [24])
    # fmt: on


def matmul(
    out: Tensor, a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, b: Tensor | None, res: Tensor | None
) -> None:
    """Write out[M, N] = a[M, K] @ w[N, K].T / (a_scale * w_scale) (+ b) (+ res)."""
    (M, K), N = a.shape, w.shape[0]
    tiles = triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N)
    _fp8_kernel[(programs(tiles),)](
        describe(out, TILE_M, TILE_N), describe(a, TILE_M, TILE_K), describe(w, TILE_N, TILE_K), b,
        describe(res, TILE_M, TILE_N), a_scale, w_scale, M, N, K, **OPTIONS,
    )  # fmt: skip
