"""What Hopper's kernels share: tiles, barriers, the pipeline of products and TMA descriptors.

Warps with different work meet at mbarriers in shared memory, `full` and `empty` for each stage of the operands.  Wait
number i of a barrier passes once the barrier has completed phase i, told apart by parity; a first wait for `empty`
passes at once, its parity being that of a phase before the first.

Registers decide the shape of a tile.  An accumulator of 128 x 256 takes 128 of each thread's of two warpgroups, one of
128 x 320 takes 160; a kernel of 12 warps starts with 168 for each thread, and its warpgroups trade them (setmaxnreg).
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpt2_triton.kernels.tiles import tile_position

# what Triton calls them now, or called them in 3.6
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
if not hasattr(gl.shared_memory_descriptor, "reinterpret"):
    gl.shared_memory_descriptor.reinterpret = gl.shared_memory_descriptor._reinterpret

TILE_M, TILE_N, TILE_K = 128, 256, 64
BLOCK_M = gl.constexpr(TILE_M)
BLOCK_N = gl.constexpr(TILE_N)
BLOCK_K = gl.constexpr(TILE_K)
GROUP_M = gl.constexpr(8)
STAGES = gl.constexpr(3)
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N.value, 16]))  # of an accumulator
OPTIONS = dict(num_warps=8, maxnreg=168)


@gluon.jit
def tiles(M, N, WIDTH: gl.constexpr):
    return gl.cdiv(M, BLOCK_M) * gl.cdiv(N, WIDTH)


@gluon.jit
def corner(tile, M, N, WIDTH: gl.constexpr):
    """First row and column of a tile."""
    tile_m, tile_n = tile_position(tile, gl.cdiv(M, BLOCK_M), gl.cdiv(N, WIDTH), GROUP_M)
    return tile_m * BLOCK_M, tile_n * WIDTH


@gluon.jit
def barriers(n: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def await_empty(empty, step, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)


@gluon.jit
def multiply(acc, step, a_bufs, w_bufs, full, use_acc, A_T: gl.constexpr, W_T: gl.constexpr, STAGES: gl.constexpr):
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
def multiply_rest(
    acc, step, steps, a_bufs, w_bufs, full, empty, A_T: gl.constexpr, W_T: gl.constexpr, STAGES: gl.constexpr
):
    """The products of a tile after its first; each, once started, waits for the one before and frees its blocks."""
    for _ in range(1, steps):
        acc = multiply(acc, step, a_bufs, w_bufs, full, True, A_T, W_T, STAGES)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    out = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return out, step


def describe(tensor: Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return None if tensor is None else TensorDescriptor.from_tensor(tensor, [rows, columns], layout)
