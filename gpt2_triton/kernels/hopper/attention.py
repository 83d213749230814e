"""Parts of attention for Hopper (attention_fwd.py, attention_dq.py, attention_dkdv.py),
for bf16 heads of 64 columns.

A program has one warpgroup, and its wgmma computes 64 rows: a block of queries (forward, dQ) or of
keys (dK, dV).  Blocks of the other kind pass through a ring of one (forward) or two stages, which
TMA fills.  No warps are set apart for loads: several programs share a multiprocessor, and while one
takes exponentials another multiplies.  In a program of the backward pass one product is in flight
while the scores become p, or p becomes ds.  kernels/attention.py has the mathematics.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gpt2_triton.kernels.device_math import LOG2E
from gpt2_triton.kernels.hopper.pipeline import Forms, barriers, describe, invalidate, tma_load
from gpt2_triton.kernels.hopper.rope import rotated_back, rotation

HEAD = 64  # columns of a head, and rows of a block

SIDE = gl.constexpr(HEAD)
STAGES = gl.constexpr(2)  # of the backward pass
SCALE = gl.constexpr(HEAD**-0.5)  # of the scores
FACTOR = gl.constexpr(SCALE.value * LOG2E.value)
NOISE = gl.constexpr(2.0**-9)  # of bf16: qk_norm.py
# of an accumulator
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16]))
# of a product's left operand in registers
OPERAND = gl.constexpr(gl.DotOperandLayout(0, LAYOUT.value, 2))


class Ring(NamedTuple):
    """Stages of two blocks, x and y, in shared memory.  Each block has a barrier: with one for
    both, Triton makes all warps wait between the two loads.
    """

    x: Any
    y: Any
    x_full: Any
    y_full: Any


@gluon.jit
def ring_of(desc, n: gl.constexpr):
    """Return n stages of blocks of a descriptor."""
    x = gl.allocate_shared_memory(gl.bfloat16, [n, SIDE, SIDE], desc.layout)
    y = gl.allocate_shared_memory(gl.bfloat16, [n, SIDE, SIDE], desc.layout)
    return Ring(x, y, barriers(n), barriers(n))


@gluon.jit
def end_ring(ring):
    """Invalidate the barriers of ring_of."""
    invalidate(ring.x_full)
    invalidate(ring.y_full)


@gluon.jit
def load_block(desc, full, block, row, column, wanted):
    """Load one block at this row and column, if it is wanted, and complete a
    phase of the barrier `full`.
    """
    mbarrier.expect(full, desc.block_type.nbytes, pred=wanted)
    tma_load(desc, [row, column], full, block, pred=wanted)


@gluon.jit
def load_pair(x_desc, y_desc, ring, stage, row, x_column, y_column, wanted):
    """Load the blocks of a stage at these rows and columns, if they are wanted.  Two calls of
    load_block would make all warps wait once more, since Triton adds a barrier between each
    `expect` and the load that follows.
    """
    x_full = ring.x_full.index(stage)
    y_full = ring.y_full.index(stage)
    mbarrier.expect(x_full, x_desc.block_type.nbytes, pred=wanted)
    mbarrier.expect(y_full, y_desc.block_type.nbytes, pred=wanted)
    tma_load(x_desc, [row, x_column], x_full, ring.x.index(stage), pred=wanted)
    tma_load(y_desc, [row, y_column], y_full, ring.y.index(stage), pred=wanted)


@gluon.jit
def scaled_gradient(dy, rope_ptr, first, T):
    """Return SCALE * dy of a head's block from token `first` on, rotated back with rope_ptr."""
    dx = dy * SCALE
    if rope_ptr is not None:
        cos, sin = rotation(dx, rope_ptr, first, T, SIDE)
        dx = rotated_back(dx, cos, sin, SIDE)
    return dx


def described(x: Forms) -> tuple[Any, ...]:
    """Return the first arguments of a kernel that writes dqkv."""
    return describe(x.rows, HEAD, HEAD), describe(x.columns, HEAD, HEAD // 2), x.scale, x.amax
