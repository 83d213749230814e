"""Attention's forward pass for Hopper, with its parts in attention.py.

A program's q stays in shared memory, as an operand of products, beside one block of keys and one of
values.  The next block of keys is loaded during the softmax, the next block of values during the
next scores.  Five programs share a multiprocessor, and while one takes exponentials another
multiplies.  All sums have the portable kernel's order: the bits are equal.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gpt2_triton.kernels.e4m3 import quantise
from gpt2_triton.kernels.hopper.attention import (
    FACTOR,
    HEAD,
    LAYOUT,
    OPERAND,
    SIDE,
    end_ring,
    load_block,
    ring_of,
)
from gpt2_triton.kernels.hopper.pipeline import barriers, describe, invalidate, tma_store, wait_full

OPTIONS = dict(num_warps=4, maxnreg=96)


@gluon.jit
def _partial_sums(p):
    """Return 8 partial sums of a row, each of every eighth column: a thread holds two of 8."""
    return gl.sum(gl.reshape(p, [SIDE, SIDE // 8, 8]), 1)


@gluon.jit
def _by_row(x, factors):
    """Return x with each row multiplied by its factor."""
    return x * gl.convert_layout(factors, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def _fwd_step(q, m, total, acc, ring, qkv_desc, row, k_column, v_column, step, steps, after):
    """Return maximum m, sum and output (log2) after another block of keys; load the next."""
    k = ring.x.index(0)
    v = ring.y.index(0)
    wait_full(ring.x_full, step, 1)
    zeros = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    load_block(
        qkv_desc, ring.x_full.index(0), k, row + (step + 1) * SIDE, k_column, step + 1 < steps
    )
    # `after`: rows from the first query to the first key; None: all queries see all keys
    if after is not None:
        i = gl.arange(0, SIDE, layout=gl.SliceLayout(1, LAYOUT))
        j = after + gl.arange(0, SIDE, layout=gl.SliceLayout(0, LAYOUT))
        s = gl.where(i[:, None] >= j[None, :], s, -1.0e30)
    m_new = gl.maximum(m, gl.max(s, 1) * FACTOR)
    p = gl.exp2(s * FACTOR - m_new[:, None])
    rescale = gl.exp2(m - m_new)
    total = _by_row(total, rescale) + _partial_sums(p)
    p = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
    acc = _by_row(acc, rescale)
    wait_full(ring.y_full, step, 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    load_block(
        qkv_desc, ring.y_full.index(0), v, row + (step + 1) * SIDE, v_column, step + 1 < steps
    )
    return m_new, total, acc


@gluon.jit
def _attention_fwd_kernel(
    out_desc, out8_desc, scale_ptr, amax_ptr, lse_ptr, qkv_desc, NH, T: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = T // SIDE
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    # most keys first: blocks with few keys fill the end
    block = BLOCKS - 1 - gl.program_id(0) % BLOCKS
    bh = gl.program_id(0) // BLOCKS
    b = bh // NH
    h = bh % NH
    first = block * SIDE
    steps = (first + SIDE) // SIDE
    row = b * T
    k_column = (NH + h // GROUP) * SIDE
    v_column = (NH + NH // GROUP + h // GROUP) * SIDE
    ring = ring_of(qkv_desc, 1)
    q = gl.allocate_shared_memory(gl.bfloat16, [SIDE, SIDE], qkv_desc.layout)
    q_full = barriers(1)
    load_block(qkv_desc, q_full.index(0), q, row + first, h * SIDE, True)
    load_block(qkv_desc, ring.x_full.index(0), ring.x.index(0), row, k_column, True)
    load_block(qkv_desc, ring.y_full.index(0), ring.y.index(0), row, v_column, True)
    m = gl.full([SIDE], -1.0e30, gl.float32, ROWS)  # finite, so that no row becomes inf - inf
    acc = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    total = _partial_sums(acc)
    wait_full(q_full, 0, 1)
    for step in range(0, first // SIDE):
        m, total, acc = _fwd_step(
            q, m, total, acc, ring, qkv_desc, row, k_column, v_column, step, steps, None
        )
    # the diagonal: one step, and a loop all the same, as ptxas spills registers without a loop
    for step in range(first // SIDE, steps):
        after = step * SIDE - first
        m, total, acc = _fwd_step(
            q, m, total, acc, ring, qkv_desc, row, k_column, v_column, step, steps, after
        )
    sums = gl.sum(total, 1)
    # store lse before out: later, lse could overwrite shared memory that TMA still reads
    at = bh.to(gl.int64) * T + first + gl.arange(0, SIDE, layout=ROWS)
    gl.store(lse_ptr + at, m + gl.log2(gl.convert_layout(sums, ROWS)))
    out = (acc / gl.convert_layout(sums, ROWS)[:, None]).to(gl.bfloat16)
    if out8_desc is not None:  # cast the rounded out: a later cast of out gives the same bits
        rows8 = gl.allocate_shared_memory(out8_desc.dtype, [SIDE, SIDE], out8_desc.layout)
        rows8.store(quantise(out.to(gl.float32), scale_ptr, amax_ptr))
    q.store(out)  # after rows8.store, so that all warps pass the fence before the first TMA store
    fence_async_shared()
    tma_store(out_desc, [row + first, h * SIDE], q)
    if out8_desc is not None:
        tma_store(out8_desc, [row + first, h * SIDE], rows8)
    invalidate(q_full)
    end_ring(ring)
    tma.store_wait(0)


def attention_fwd(
    out: Tensor,
    out8: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    lse: Tensor,
    qkv: Tensor,
    group: int,
) -> None:
    """Write out, bf16 [B*T, C], and lse, fp32 [B, NH, T], of qkv, bf16 [B*T, D].  With out8,
    e4m3 [B*T, C], write also out times scale, fp32 [1], and record the amax in int32
    [AMAX_CELLS] unless amax is None.
    """
    B, NH, T = lse.shape
    _attention_fwd_kernel[(T // HEAD * B * NH,)](
        describe(out, HEAD, HEAD), describe(out8, HEAD, HEAD), scale, amax, lse,
        describe(qkv, HEAD, HEAD), NH, T=T, GROUP=group, **OPTIONS,
    )  # fmt: skip
