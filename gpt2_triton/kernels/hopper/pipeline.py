"""Parts of Hopper's kernels: tile constants, barriers, the ring of operand blocks,
products, stores, TMA descriptors.

A kernel's warps are divided into partitions with different work, which synchronise at mbarriers in
shared memory.  Each stage of a ring has two: `full` completes a phase when the blocks have arrived,
`empty` when they have been used.  Wait i on `full` passes once phase i is complete, wait i on
`empty` once phase i - 1 is.  A barrier knows a phase by its parity.  So the first wait on `empty`
returns at once: it waits for parity 1, as if a phase -1 were complete.

Registers limit a tile.  With two warpgroups, an accumulator of 128 x 256 takes 128 registers of
each thread; 128 x 320 takes 160.  A kernel of 12 warps starts with 168 per thread, and its
warpgroups redistribute them (setmaxnreg).
"""

from typing import Any, NamedTuple

import torch
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

from gpt2_triton.kernels.e4m3 import paired_columns, quantised
from gpt2_triton.kernels.tiles import halves, tile_corner
from gpt2_triton.operands import Fp8, Operand

# newer names, then Triton 3.6's
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
if not hasattr(gl.shared_memory_descriptor, "reinterpret"):
    gl.shared_memory_descriptor.reinterpret = gl.shared_memory_descriptor._reinterpret

TILE_M = 128
TILE_N = 256
TILE_K = 64
WIDE_N = 320  # a tile's width in matmul_wide.py
BLOCK_M = gl.constexpr(TILE_M)
BLOCK_N = gl.constexpr(TILE_N)
BLOCK_K = gl.constexpr(TILE_K)
GROUP_M = gl.constexpr(8)  # of dW, whose sums depend on it
# of other products: the half tiles at the edge of 1,600 columns then go to all programs alike
BAND = gl.constexpr(12)
STAGES = gl.constexpr(3)
# of an accumulator
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N.value, 16]))
OPTIONS = dict(num_warps=8, maxnreg=168)
DTYPES = {
    torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5,
    torch.int16: gl.int16, torch.uint8: gl.uint8,
}  # fmt: skip


# Write a tuple of constexprs or sizes in the call itself.  Triton makes tensors of a tuple that has
# a name, and each partition then captures them in shared memory.


class Operands(NamedTuple):
    """A ring of blocks of a and w in shared memory, and its barriers; w is a tuple, one
    ring for each accumulator.
    """

    a: Any
    w: tuple
    full: Any
    empty: Any


class Channel(NamedTuple):
    """Shared memory that one partition fills and another empties, and the barriers
    by which they take turns.
    """

    buf: Any
    full: Any
    empty: Any


class Buffer(NamedTuple):
    """Shared memory of one partition, in the place of a channel."""

    buf: Any


@gluon.jit
def tiles(M, N, WIDTH: gl.constexpr):
    """Return the number of tiles of BLOCK_M x WIDTH."""
    return gl.cdiv(M, BLOCK_M) * gl.cdiv(N, WIDTH)


@gluon.jit
def corner(tile, M, N, WIDTH: gl.constexpr):
    """Return the first row and column of a tile of BLOCK_M x WIDTH."""
    return tile_corner(tile, M, N, BLOCK_M, WIDTH, BAND)


@gluon.jit
def quarters(tile):
    """Return the four quarters of a tile's columns, from left to right."""
    left, right = halves(tile)
    first, second = halves(left)
    third, fourth = halves(right)
    return first, second, third, fourth


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr = 1):
    """Return n barriers; each completes a phase with `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def channel(buf, IS_SHARED: gl.constexpr, emptied: gl.constexpr = 1):
    """Return a channel that `emptied` arrivals make empty.  An unshared channel has no barriers,
    because a barrier that nothing uses would lose its memory (see `invalidate`).
    """
    if IS_SHARED:
        return Channel(buf, barriers(1).index(0), barriers(1, emptied).index(0))
    else:
        return Buffer(buf)


@gluon.jit
def invalidate(bars):
    """Invalidate barriers, at the end of a kernel without partitions.  Triton's allocator reuses a
    barrier's memory after the last use; the PTX ISA allows that only after mbarrier.inval.  Without
    mbarrier.inval, runs that shared a GPU had wrong bytes in that memory.  In a kernel with
    partitions, barriers keep their memory to the end.
    """
    COUNT: gl.constexpr = bars.shape[0]
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(bars.index(i))


@gluon.jit
def wait_empty(empty, step, STAGES: gl.constexpr):
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)


@gluon.jit
def wait_full(full, step, STAGES: gl.constexpr):
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)


@gluon.jit
def load_blocks(a_desc, w_descs, ring, step, m, n, k, A_T: gl.constexpr, W_T: gl.constexpr):
    """Load a[m:, k:] and w[k:, n:] for this step once its stage is empty;
    A_T, W_T: stored transposed.
    """
    STAGES: gl.constexpr = ring.a.shape[0]
    wait_empty(ring.empty, step, STAGES)
    stage = step % STAGES
    full = ring.full.index(stage)
    strip_bytes: gl.constexpr = w_descs[1].block_type.nbytes if len(w_descs) == 2 else 0
    mbarrier.expect(full, a_desc.block_type.nbytes + w_descs[0].block_type.nbytes + strip_bytes)
    if A_T:
        tma_load(a_desc, [k, m], full, ring.a.index(stage))
    else:
        tma_load(a_desc, [m, k], full, ring.a.index(stage))
    for i in gl.static_range(len(w_descs)):
        if W_T:
            tma_load(w_descs[i], [n + i * BLOCK_N, k], full, ring.w[i].index(stage))
        else:
            tma_load(w_descs[i], [k, n + i * BLOCK_N], full, ring.w[i].index(stage))


@gluon.jit
def issue_mma(accs, ring, step, use_acc, A_T: gl.constexpr, W_T: gl.constexpr):
    """Start acc (+)= a @ w of this step for each accumulator when its blocks arrive.
    A_T, W_T: stored transposed.
    """
    STAGES: gl.constexpr = ring.a.shape[0]
    stage = step % STAGES
    started = ()
    for i in gl.static_range(len(accs)):
        wait_full(ring.full, step, STAGES)  # returns at once for the second accumulator
        a = ring.a.index(stage)
        if A_T:
            a = a.permute((1, 0))
        w = ring.w[i].index(stage)
        if W_T:
            w = w.permute((1, 0))
        started += (warpgroup_mma(a, w, accs[i], use_acc=use_acc, is_async=True),)
    return started


@gluon.jit
def mma_loop(accs, ring, step, steps, A_T: gl.constexpr, W_T: gl.constexpr):
    """Add the products of a tile's second step and all later steps.  A step starts, waits
    for the step before, and frees the blocks of the step before.  Returns the accumulators
    and the step of the next tile.
    """
    STAGES: gl.constexpr = ring.a.shape[0]
    for _ in range(1, steps):
        accs = issue_mma(accs, ring, step, True, A_T, W_T)
        done = warpgroup_mma_wait(len(accs), deps=accs)
        if len(accs) == 1:
            accs = (warpgroup_mma_init(done),)
        else:
            accs = (warpgroup_mma_init(done[0]), warpgroup_mma_init(done[1]))
        mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
        step += 1
    sums = warpgroup_mma_wait(0, deps=accs)
    mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
    return sums, step


@gluon.jit
def columns_buffer(desc):
    return gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def stage_forms(desc, columns_desc, scale, amax_ptr, value, buffer=None):
    """Return a tile in shared memory, ready for TMA: in bf16, or in e4m3 and, with columns_desc,
    transposed to `buffer` or a new one.  `scale` is None for bf16.
    """
    rows = gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)
    columns = rows
    if columns_desc is not None:
        columns = columns_buffer(columns_desc) if buffer is None else buffer
        columns.store(paired_columns(value * scale))
    if scale is not None:
        value = quantised(value, scale, amax_ptr)
    rows.store(value.to(desc.dtype))
    # here: the last barrier before the TMA stores may be in the next call's maximum
    fence_async_shared()
    return rows, columns


@gluon.jit
def store_forms(desc, columns_desc, staged, row, column):
    """Start the stores of what stage_forms returned."""
    tma_store(desc, [row, column], staged[0])
    if columns_desc is not None:
        tma_store(columns_desc, [column, row // 2], staged[1])


def describe(tensor: Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    """Return TMA's view of a matrix in blocks of rows x columns."""
    if tensor is None:
        return None
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


class Forms(NamedTuple):
    """An operand as it is stored: rows in bf16, or in fp8 with scale and amax, and perhaps
    transposed too.
    """

    rows: Tensor | None  # bf16 or fp8 [R, C]
    columns: Tensor | None = None  # int16 [C, R/2], pairs of rows in fp8
    scale: Tensor | None = None  # fp32 [1]
    amax: Tensor | None = None  # int32 [AMAX_CELLS]

    @classmethod
    def of(cls, x: Operand | None) -> "Forms":
        if not isinstance(x, Fp8):
            return cls(x)
        columns = x.columns.view(torch.int16) if x.transposed else None
        return cls(x.rows, columns, x.scale, x.amax)
