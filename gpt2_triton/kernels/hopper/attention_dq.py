"""dQ for Hopper: the first kernel of attention's backward pass, with its parts in attention.py.

A program's q and dout stay in shared memory, as operands of products; its blocks of keys are k and
v.  Four programs share a multiprocessor.  delta is computed first, and dq's sums have the portable
kernel's order: the bits are equal.
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

from gpt2_triton.kernels.e4m3 import paired_columns
from gpt2_triton.kernels.epilogue import RopeArguments
from gpt2_triton.kernels.hopper.attention import (
    FACTOR,
    HEAD,
    LAYOUT,
    NOISE,
    OPERAND,
    SCALE,
    SIDE,
    STAGES,
    described,
    end_ring,
    load_pair,
    ring_of,
    scaled_gradient,
)
from gpt2_triton.kernels.hopper.pipeline import (
    Forms,
    columns_buffer,
    describe,
    stage_forms,
    store_forms,
    tma_store,
    wait_full,
)
from gpt2_triton.kernels.hopper.rope import (
    head_norm_bwd,
    rotation,
    shared_weights,
    store_terms,
)

OPTIONS = dict(num_warps=4, maxnreg=128)
# 16 bytes of out a thread
ROW_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _dq_step(q, dout, dq, lse, delta, ring, step, DIAGONAL: gl.constexpr):
    """Add ds @ k of the block of keys in this step's stage."""
    k = ring.x.index(step % STAGES)
    v = ring.y.index(step % STAGES)
    zeros = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    wait_full(ring.x_full, step, STAGES)
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    wait_full(ring.y_full, step, STAGES)
    dp = warpgroup_mma(dout, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.exp2(s * FACTOR - lse[:, None])
    if DIAGONAL:
        i = gl.arange(0, SIDE, layout=gl.SliceLayout(1, LAYOUT))
        j = gl.arange(0, SIDE, layout=gl.SliceLayout(0, LAYOUT))
        p = gl.where(i[:, None] >= j[None, :], p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(gl.bfloat16), OPERAND)
    dq = warpgroup_mma(ds, k, dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
    return dq


@gluon.jit
def _load_block(ptr, stride, layout: gl.constexpr):
    r = gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, SIDE, layout=gl.SliceLayout(0, layout))
    return gl.load(ptr + r[:, None] * stride + c[None, :])


@gluon.jit
def _attention_dq_kernel(
    dqkv_desc, columns_desc, scale_ptr, amax_ptr, out_columns_desc, out_scale_ptr, part_ptr,
    delta_ptr, dout_desc, qkv_desc, out_ptr, lse_ptr, rope_ptr, norm_ptr, rstd_ptr, NH,
    T: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    # the program's queries: a block of head h of sequence b
    BLOCKS: gl.constexpr = T // SIDE
    # most keys first: blocks with few keys fill the end
    block = BLOCKS - 1 - gl.program_id(0) % BLOCKS
    bh = gl.program_id(0) // BLOCKS
    b = bh // NH
    h = bh % NH
    first = block * SIDE
    # the loads of q and dout, and of the first blocks of keys
    k_column = (NH + h // GROUP) * SIDE
    v_column = (NH + NH // GROUP + h // GROUP) * SIDE
    ring = ring_of(qkv_desc, STAGES)
    own = ring_of(qkv_desc, 1)  # of q and dout
    if norm_ptr is not None:
        weights = shared_weights(norm_ptr, NOISE, SIDE)
    row = b * T + first
    column = h * SIDE
    load_pair(qkv_desc, dout_desc, own, 0, row, column, column, True)
    for step in gl.static_range(STAGES):
        load_pair(
            qkv_desc, qkv_desc, ring, step, b * T + step * SIDE, k_column, v_column, step <= block
        )
    # delta, and out's columns
    at = bh.to(gl.int64) * T + first + gl.arange(0, SIDE, layout=gl.SliceLayout(1, LAYOUT))
    lse = gl.load(lse_ptr + at)
    out_ptr += row.to(gl.int64) * (NH * SIDE) + column
    out = _load_block(out_ptr, NH * SIDE, ROW_LAYOUT)
    columns = None
    if out_columns_desc is not None:
        columns = columns_buffer(out_columns_desc)  # later for dq's columns
        # loaded again: to exchange it between threads takes shared memory, and three
        # programs would fit, not four
        again = _load_block(out_ptr, NH * SIDE, LAYOUT).to(gl.float32)
        columns.store(paired_columns(again * gl.load(out_scale_ptr)))
        fence_async_shared()
        tma_store(out_columns_desc, [column, row // 2], columns)
    wait_full(own.x_full, 0, 1)
    wait_full(own.y_full, 0, 1)
    q = own.x.index(0)
    dout = own.y.index(0)
    delta = gl.sum(out.to(gl.float32) * dout.load(ROW_LAYOUT).to(gl.float32), 1)
    delta = gl.convert_layout(delta, gl.SliceLayout(1, LAYOUT))
    gl.store(delta_ptr + at, delta)
    # the sums over keys
    dq = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    for step in range(0, block):
        dq = _dq_step(q, dout, dq, lse, delta, ring, step, False)
        next_row = b * T + (step + STAGES) * SIDE
        load_pair(
            qkv_desc, qkv_desc, ring, step % STAGES, next_row, k_column, v_column,
            step + STAGES <= block,
        )  # fmt: skip
    # the last step hides the load
    scale = None
    if scale_ptr is not None:
        scale = gl.load(scale_ptr)
    dq = _dq_step(q, dout, dq, lse, delta, ring, block, True)
    # scale, rotation, norm, and what is summed over tokens.  These sums come before the TMA stores:
    # a later sum could overwrite shared memory that TMA still reads
    if norm_ptr is not None:
        cos, sin = rotation(dq, rope_ptr, first, T, SIDE)
        y = q.load(LAYOUT).to(gl.float32)
        heads = NH + NH // GROUP
        rstd_ptr += row.to(gl.int64) * heads + h
        i = gl.arange(0, SIDE, layout=gl.SliceLayout(1, LAYOUT))
        rstd = gl.load(rstd_ptr + i * heads) * SCALE
        dq, terms = head_norm_bwd(dq, y, cos, sin, weights, rstd, SIDE)
        part_ptr += ((b * BLOCKS + block) * 2 * NH + h) * SIDE
        store_terms(part_ptr, NH * SIDE, terms, SIDE)
    else:
        dq = scaled_gradient(dq, rope_ptr, first, T)
        if part_ptr is not None:
            d = gl.arange(0, SIDE, layout=gl.SliceLayout(0, LAYOUT))
            gl.store(part_ptr + ((b * BLOCKS + block) * NH + h) * SIDE + d, gl.sum(dq, 0))
    if out_columns_desc is not None:
        tma.store_wait(0)
    staged = stage_forms(dqkv_desc, columns_desc, scale, amax_ptr, dq, columns)
    store_forms(dqkv_desc, columns_desc, staged, row, column)
    end_ring(own)
    end_ring(ring)
    tma.store_wait(0)


def attention_bwd_dq(
    dqkv: Forms, part: Tensor | None, delta: Tensor, dout: Tensor, qkv: Tensor, out8: Forms,
    out: Tensor, lse: Tensor, rope: RopeArguments, group: int,
) -> int:  # fmt: skip
    """Write dq into dqkv, delta, fp32 [B, NH, T], dq's column sums, or the terms of a norm's dw,
    for each block of 64 queries into part, fp32 [B*T/64, C], and out8's columns if there are any.
    dout and out are bf16 [B*T, C], qkv bf16 [B*T, D], lse fp32 [B, NH, T].  Return part's rows.
    """
    B, NH, T = lse.shape
    blocks = T // HEAD
    _attention_dq_kernel[(blocks * B * NH,)](
        *described(dqkv), describe(out8.columns, HEAD, HEAD // 2), out8.scale, part, delta,
        describe(dout, HEAD, HEAD), describe(qkv, HEAD, HEAD), out, lse, rope.table, rope.w,
        rope.rstd, NH, T=T, GROUP=group, **OPTIONS,
    )  # fmt: skip
    return B * blocks * (1 if rope.w is None else 2)
