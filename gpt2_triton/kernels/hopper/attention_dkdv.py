"""dK and dV for Hopper: the second kernel of attention's backward pass,
with its parts in attention.py.

A program's k and v stay in registers; its blocks of queries are q and dout, and lse and delta
of a span of the sequence are in shared memory.  It takes the heads of its group one after the
other, and the spans of each head.  Scores are transposed, [keys, queries], and computed for
32 queries at a time, so that p and ds fit in registers.  dv has the portable kernel's bits.
dk does not: the portable kernel starts the sum of v @ dout.T at -delta, and this kernel
subtracts delta from the sum.

lse and delta could come with each block; but GPT-2's dK and dV then take 13% longer.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

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
from gpt2_triton.kernels.hopper.pipeline import Forms, describe, stage_forms, store_forms, wait_full
from gpt2_triton.kernels.hopper.rope import (
    head_norm_bwd,
    rotation,
    shared_weights,
    store_terms,
)
from gpt2_triton.kernels.tuning import next_power_of_2

OPTIONS = dict(num_warps=4, maxnreg=168)
PROGRAMS = 3  # that share a multiprocessor: its 65,536 registers hold 3 x 128 threads x 168
SHARED = 228 * 1024 // PROGRAMS - 1024  # bytes of shared memory for each; CUDA takes 1 KB more
# tokens of a span: 2,048, a power of two; their lse and delta, fp32, fit
# beside six blocks and the barriers
LONGEST = 1 << ((SHARED - 6 * HEAD * HEAD * 2 - 256) // 8).bit_length() - 1

PART = gl.constexpr(32)  # queries that are scored at a time
PART_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART.value, 16]))
PART_OPERAND = gl.constexpr(gl.DotOperandLayout(0, PART_LAYOUT.value, 2))
VECTOR_LAYOUT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
VECTOR_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Queries(NamedTuple):
    """What a program reads of queries: descriptors, the ring of their blocks, and a span's lse and
    delta in shared memory.
    """

    qkv_desc: Any
    dout_desc: Any
    ring: Any
    lse: Any
    delta: Any


@gluon.jit
def _load_queries(queries, stage, row, column, wanted):
    """Load a block of q and of dout at this row and column, if they are wanted."""
    load_pair(queries.qkv_desc, queries.dout_desc, queries.ring, stage, row, column, column, wanted)


@gluon.jit
def _dkdv_step(k, v, dk, dv, queries, step, part, keys, DIAGONAL: gl.constexpr):
    """Add p.T @ dout and ds.T @ q of the block of queries in this step's stage;
    `part` is the block's first part, and `keys` the first part of the program's keys,
    counted from the span's start.
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PART_LAYOUT)
    zeros = gl.zeros([SIDE, PART], gl.float32, PART_LAYOUT)
    ring = queries.ring
    stage = step % STAGES
    wait_full(ring.x_full, step, STAGES)
    for n in gl.static_range(SIDE // PART):
        q = ring.x.index(stage).slice(n * PART, PART, dim=0)
        dout = ring.y.index(stage).slice(n * PART, PART, dim=0)
        s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if n == 0:
            wait_full(ring.y_full, step, STAGES)
        dp = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * FACTOR - queries.lse.index(part + n).load(COLUMNS)[None, :])
        if DIAGONAL:
            # i and j count from the span's start: from the block's start
            # they cost 12 more instructions
            i = (part + n) * PART + gl.arange(0, PART, layout=COLUMNS)
            j = keys * PART + gl.arange(0, SIDE, layout=gl.SliceLayout(1, PART_LAYOUT))
            p = gl.where(i[None, :] >= j[:, None], p, 0.0)
        p16 = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
        dv = warpgroup_mma(p16, dout, dv, is_async=True)
        delta = queries.delta.index(part + n).load(COLUMNS)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = gl.convert_layout((p * (dp - delta[None, :])).to(gl.bfloat16), OPERAND)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dk, dv, p16, ds = warpgroup_mma_wait(0, deps=(dk, dv, p16, ds))
    return dk, dv


@gluon.jit
def _begin_head(
    queries, lse_ptr, delta_ptr, base, row, bh, h, first, steps, start, T: gl.constexpr,
    SPAN: gl.constexpr,
):  # fmt: skip
    """Load the first blocks of queries of a head's span, into the stages of steps from `base` on,
    and lse and delta of the span, which begins at token `start`.
    """
    for step in gl.static_range(STAGES):
        at = row + step * SIDE
        _load_queries(queries, (base + step) % STAGES, at, h * SIDE, step < steps)
    i = start + gl.arange(0, SPAN, layout=VECTOR_LAYOUT)
    at = bh.to(gl.int64) * T + i
    needed = (i >= first) & (i < T)
    lse = queries.lse.reinterpret(gl.float32, [SPAN], VECTOR_SHARED)
    lse.store(gl.load(lse_ptr + at, mask=needed, other=0.0))
    delta = queries.delta.reinterpret(gl.float32, [SPAN], VECTOR_SHARED)
    delta.store(gl.load(delta_ptr + at, mask=needed, other=0.0))


@gluon.jit
def _take_head(k, v, dk, dv, queries, base, row, h, block, keys, steps):
    """Add the blocks of queries of a head's span, from `block` on; `keys` is the program's."""
    PARTS: gl.constexpr = SIDE // PART
    dk, dv = _dkdv_step(k, v, dk, dv, queries, base, block * PARTS, keys * PARTS, True)
    _load_queries(queries, base % STAGES, row + STAGES * SIDE, h * SIDE, STAGES < steps)
    for step in range(1, steps):
        part = (block + step) * PARTS
        dk, dv = _dkdv_step(k, v, dk, dv, queries, base + step, part, keys * PARTS, False)
        at = row + (step + STAGES) * SIDE
        _load_queries(queries, (base + step) % STAGES, at, h * SIDE, step + STAGES < steps)
    return dk, dv


@gluon.jit
def _attention_dkdv_kernel(
    dqkv_desc, columns_desc, scale_ptr, amax_ptr, part_ptr, dout_desc, qkv_desc, lse_ptr, delta_ptr,
    rope_ptr, norm_ptr, rstd_ptr, NH, T: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    # the program's keys: a block of head kv of sequence b
    BLOCKS: gl.constexpr = T // SIDE
    NKV = NH // GROUP
    block = gl.program_id(0) % BLOCKS  # the first keys are seen by the most queries and start first
    bkv = gl.program_id(0) // BLOCKS
    b = bkv // NKV
    kv = bkv % NKV
    first = block * SIDE
    row = b * T + first
    # the spans of queries that see them, from the one with the keys on, and its blocks
    SPANS: gl.constexpr = (T + SPAN - 1) // SPAN
    if SPANS == 1:
        start = 0
        spans = 1
        steps = BLOCKS - block
    else:
        start = first // SPAN * SPAN
        spans = SPANS - first // SPAN
        steps = (min(T, start + SPAN) - first) // SIDE
    # the loads of k and v, and of the first blocks of queries
    k_column = (NH + kv) * SIDE
    v_column = (NH + NKV + kv) * SIDE
    ring = ring_of(qkv_desc, STAGES)
    own = ring_of(qkv_desc, 1)  # of k and v
    lse_buf = gl.allocate_shared_memory(gl.float32, [SPAN // PART, PART], VECTOR_SHARED)
    delta_buf = gl.allocate_shared_memory(gl.float32, [SPAN // PART, PART], VECTOR_SHARED)
    queries = Queries(qkv_desc, dout_desc, ring, lse_buf, delta_buf)
    if norm_ptr is not None:
        weights = shared_weights(norm_ptr + SIDE, NOISE, SIDE)
    load_pair(qkv_desc, qkv_desc, own, 0, row, k_column, v_column, True)
    h = kv * GROUP
    bh = bkv * GROUP
    _begin_head(queries, lse_ptr, delta_ptr, 0, row, bh, h, first, steps, start, T, SPAN)
    scale = None
    if scale_ptr is not None:
        scale = gl.load(scale_ptr)
    wait_full(own.x_full, 0, 1)
    wait_full(own.y_full, 0, 1)
    k = own.x.index(0).load(PART_OPERAND)
    v = own.y.index(0).load(PART_OPERAND)
    # the sums, over the spans of each head of the group
    dk = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    dv = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    keys = block - start // SIDE
    dk, dv = _take_head(k, v, dk, dv, queries, 0, row, h, keys, keys, steps)
    base = steps
    for n in range(1, GROUP * spans):
        member = n // spans
        h = kv * GROUP + member
        if SPANS > 1:
            start = start + SPAN if start + SPAN < T else first // SPAN * SPAN
            row = b * T + max(first, start)
            steps = (min(T, start + SPAN) - max(first, start)) // SIDE
            keys = (first - start) // SIDE
        bh = bkv * GROUP + member
        _begin_head(queries, lse_ptr, delta_ptr, base, row, bh, h, first, steps, start, T, SPAN)
        dk, dv = _take_head(k, v, dk, dv, queries, base, row, h, max(keys, 0), keys, steps)
        base += steps
    # scale, rotation, norm, and what is summed over tokens.  These sums come before the TMA stores:
    # a later sum could overwrite shared memory that TMA still reads
    if norm_ptr is not None:
        # dv first: dk's norm takes its registers
        staged_dv = stage_forms(dqkv_desc, columns_desc, scale, amax_ptr, dv)
        cos, sin = rotation(dk, rope_ptr, first, T, SIDE)
        # loaded again, in dk's layout
        y = own.x.index(0).load(LAYOUT).to(gl.float32)
        heads = NH + NKV
        rstd_ptr += (b * T + first).to(gl.int64) * heads + NH + kv
        j = gl.arange(0, SIDE, layout=gl.SliceLayout(1, LAYOUT))
        rstd = gl.load(rstd_ptr + j * heads) * SCALE
        dk, terms = head_norm_bwd(dk, y, cos, sin, weights, rstd, SIDE)
        part_ptr += ((b * BLOCKS + block) * 2 * NKV + kv) * SIDE
        store_terms(part_ptr, NKV * SIDE, terms, SIDE)
    else:
        if part_ptr is not None:
            own_sums = ((b * BLOCKS + block) * 2 * NKV + kv) * SIDE
            part_ptr += own_sums + gl.arange(0, SIDE, layout=gl.SliceLayout(0, LAYOUT))
            gl.store(part_ptr + NKV * SIDE, gl.sum(dv, 0))
        staged_dv = stage_forms(dqkv_desc, columns_desc, scale, amax_ptr, dv)
        dk = scaled_gradient(dk, rope_ptr, first, T)
        if part_ptr is not None:
            gl.store(part_ptr, gl.sum(dk, 0))
    staged_dk = stage_forms(dqkv_desc, columns_desc, scale, amax_ptr, dk)
    store_forms(dqkv_desc, columns_desc, staged_dk, b * T + first, k_column)
    store_forms(dqkv_desc, columns_desc, staged_dv, b * T + first, v_column)
    end_ring(own)
    end_ring(ring)
    tma.store_wait(0)


def attention_bwd_dkdv(
    dqkv: Forms, part: Tensor | None, dout: Tensor, qkv: Tensor, lse: Tensor, delta: Tensor,
    rope: RopeArguments, group: int,
) -> int:  # fmt: skip
    """Write dk and dv into dqkv, and their column sums, or for dk the terms of a norm's dw, for
    each block of 64 keys into part, fp32 [B*T/64, 2*Ckv].  dout is bf16 [B*T, C], qkv
    bf16 [B*T, D], lse and delta are fp32 [B, NH, T].  Return part's rows.
    """
    B, NH, T = lse.shape
    blocks = T // HEAD
    _attention_dkdv_kernel[(blocks * B * NH // group,)](
        *described(dqkv), part, describe(dout, HEAD, HEAD), describe(qkv, HEAD, HEAD), lse, delta,
        rope.table, rope.w, rope.rstd, NH, T=T, SPAN=min(next_power_of_2(T), LONGEST), GROUP=group,
        **OPTIONS,
    )  # fmt: skip
    return B * blocks * (1 if rope.w is None else 2)
