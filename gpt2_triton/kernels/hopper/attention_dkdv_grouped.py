"""dK and dV for Hopper of grouped heads, or of long sequences; attention_dkdv.py has one short head a program.

A program's k and v stay in registers; its blocks of queries are q and dout, with their lse and delta.  It takes the
heads of its group one after the other.  Scores are transposed, [keys, queries], and computed for 32 queries at a time,
so that p and ds fit in registers.  dv has the portable kernel's bits.  dk does not: the portable kernel starts the sum
of v @ dout.T at -delta, and this kernel subtracts delta from the sum.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpt2_triton.kernels.hopper.attention import (
    FACTOR,
    HEAD,
    LAYOUT,
    OPERAND,
    SCALE,
    SIDE,
    STAGES,
    Forms,
    Ring,
    end_ring,
    load_pair,
    ring_of,
    stage_gradient,
    store_gradient,
)
from gpt2_triton.kernels.hopper.pipeline import barriers, describe, tma_load, wait_full
from gpt2_triton.kernels.hopper.rope import rotated, rotation

OPTIONS = dict(num_warps=4, maxnreg=168)  # three programs share a multiprocessor

PART = gl.constexpr(32)  # queries that are scored at a time
PART_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART.value, 16]))
PART_OPERAND = gl.constexpr(gl.DotOperandLayout(0, PART_LAYOUT.value, 2))
PARTS = gl.constexpr(HEAD // PART.value)
VECTOR_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Queries(NamedTuple):
    """Blocks of queries: their descriptors, a ring of q and dout, one of lse and delta, and the latter in parts."""

    descs: Any  # of qkv, dout, lse and delta
    ring: Any
    vectors: Any
    lse: Any
    delta: Any


@gluon.jit
def _load_queries(src, stage, b, h, i, NH, T: gl.constexpr, wanted):
    """Load the queries from i on of head h, if they are wanted.  Two loads with one barrier would make all warps wait
    between them; see load_pair too.
    """
    qkv_desc, dout_desc, lse_desc, delta_desc = src.descs
    mbarrier.expect(src.ring.x_full.index(stage), qkv_desc.block_type.nbytes, pred=wanted)
    mbarrier.expect(src.ring.y_full.index(stage), dout_desc.block_type.nbytes, pred=wanted)
    mbarrier.expect(src.vectors.x_full.index(stage), lse_desc.block_type.nbytes, pred=wanted)
    mbarrier.expect(src.vectors.y_full.index(stage), delta_desc.block_type.nbytes, pred=wanted)
    row = b * T + i
    tma_load(qkv_desc, [row, h * SIDE], src.ring.x_full.index(stage), src.ring.x.index(stage), pred=wanted)
    tma_load(dout_desc, [row, h * SIDE], src.ring.y_full.index(stage), src.ring.y.index(stage), pred=wanted)
    at = [b * NH + h, i]
    tma_load(lse_desc, at, src.vectors.x_full.index(stage), src.vectors.x.index(stage), pred=wanted)
    tma_load(delta_desc, at, src.vectors.y_full.index(stage), src.vectors.y.index(stage), pred=wanted)


@gluon.jit
def _dkdv_step(k, v, dk, dv, src, step, DIAGONAL: gl.constexpr):
    """Add p.T @ dout and ds.T @ q of the block of queries in this step's stage."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PART_LAYOUT)
    ring = src.ring
    zeros = gl.zeros([SIDE, PART], gl.float32, PART_LAYOUT)
    stage = step % STAGES
    wait_full(ring.x_full, step, STAGES)
    for n in gl.static_range(PARTS):
        q = ring.x.index(stage).slice(n * PART, PART, dim=0)
        dout = ring.y.index(stage).slice(n * PART, PART, dim=0)
        s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if n == 0:
            wait_full(ring.y_full, step, STAGES)
            wait_full(src.vectors.x_full, step, STAGES)
            wait_full(src.vectors.y_full, step, STAGES)
        dp = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * FACTOR - src.lse.index(stage * PARTS + n).load(COLUMNS)[None, :])
        if DIAGONAL:
            i = n * PART + gl.arange(0, PART, layout=COLUMNS)
            j = gl.arange(0, SIDE, layout=gl.SliceLayout(1, PART_LAYOUT))
            p = gl.where(i[None, :] >= j[:, None], p, 0.0)
        p16 = gl.convert_layout(p.to(gl.bfloat16), OPERAND)
        dv = warpgroup_mma(p16, dout, dv, is_async=True)
        delta = src.delta.index(stage * PARTS + n).load(COLUMNS)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = gl.convert_layout((p * (dp - delta[None, :])).to(gl.bfloat16), OPERAND)
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        dk, dv, p16, ds = warpgroup_mma_wait(0, deps=(dk, dv, p16, ds))
    return dk, dv


@gluon.jit
def _next(h, i, first, T: gl.constexpr):
    """Return head and first query of the block after this one: the next of the head, or the next head's first."""
    ended = i + SIDE == T
    return h + 1 if ended else h, first if ended else i + SIDE


@gluon.jit
def _attention_dkdv_grouped_kernel(
    dqkv_desc, columns_desc, scale_ptr, amax_ptr, part_ptr, dout_desc, qkv_desc, lse_desc, delta_desc, rope_ptr, NH,
    T: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = T // SIDE
    NKV = NH // GROUP
    block = gl.program_id(0) % BLOCKS  # the first keys are seen by the most queries and start first
    b = gl.program_id(0) // BLOCKS // NKV
    kv = gl.program_id(0) // BLOCKS % NKV
    first = block * SIDE
    steps = BLOCKS - block
    k_column = (NH + kv) * SIDE
    v_column = (NH + NKV + kv) * SIDE
    ring = ring_of(qkv_desc, STAGES)
    own = ring_of(qkv_desc, 1)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIDE], lse_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SIDE], delta_desc.layout)
    vectors = Ring(lse_ring, delta_ring, barriers(STAGES), barriers(STAGES))
    lse = lse_ring.reinterpret(gl.float32, [STAGES * PARTS, PART], VECTOR_SHARED)
    delta = delta_ring.reinterpret(gl.float32, [STAGES * PARTS, PART], VECTOR_SHARED)
    src = Queries((qkv_desc, dout_desc, lse_desc, delta_desc), ring, vectors, lse, delta)
    load_pair(qkv_desc, qkv_desc, own, 0, b * T + first, k_column, v_column, True)
    h = kv * GROUP  # head and queries of the next load
    i = first
    for step in gl.static_range(STAGES):
        _load_queries(src, step, b, h, i, NH, T, step < GROUP * steps)
        h, i = _next(h, i, first, T)
    wait_full(own.x_full, 0, 1)
    wait_full(own.y_full, 0, 1)
    k = own.x.index(0).load(PART_OPERAND)
    v = own.y.index(0).load(PART_OPERAND)
    dk = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    dv = gl.zeros([SIDE, SIDE], gl.float32, LAYOUT)
    step = 0
    for _ in range(GROUP):
        dk, dv = _dkdv_step(k, v, dk, dv, src, step, True)
        _load_queries(src, step % STAGES, b, h, i, NH, T, step + STAGES < GROUP * steps)
        h, i = _next(h, i, first, T)
        step += 1
        for _ in range(1, steps):
            dk, dv = _dkdv_step(k, v, dk, dv, src, step, False)
            _load_queries(src, step % STAGES, b, h, i, NH, T, step + STAGES < GROUP * steps)
            h, i = _next(h, i, first, T)
            step += 1
    dk *= SCALE
    if rope_ptr is not None:
        cos, sin = rotation(dk, rope_ptr, first, T, SIDE)
        dk = rotated(dk, cos, -sin, SIDE)
    if part_ptr is not None:
        # sum before the TMA stores: a later sum could overwrite shared memory that TMA still reads
        part_ptr += ((b * BLOCKS + block) * 2 * NKV + kv) * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(0, LAYOUT))
        gl.store(part_ptr, gl.sum(dk, 0))
        gl.store(part_ptr + NKV * SIDE, gl.sum(dv, 0))
    staged_dk = stage_gradient(dqkv_desc, columns_desc, scale_ptr, amax_ptr, dk)
    staged_dv = stage_gradient(dqkv_desc, columns_desc, scale_ptr, amax_ptr, dv)
    store_gradient(dqkv_desc, columns_desc, staged_dk, b * T + first, k_column)
    store_gradient(dqkv_desc, columns_desc, staged_dv, b * T + first, v_column)
    end_ring(own)
    end_ring(ring)
    end_ring(vectors)
    tma.store_wait(0)


def attention_bwd_dkdv(
    dqkv: Forms, part: Tensor | None, dout: Tensor, qkv: Tensor, lse: Tensor, delta: Tensor, rope: Tensor | None,
    group: int,
) -> int:  # fmt: skip
    """Write dk and dv into dqkv, and their column sums for each block of 64 keys into part, fp32 [B*T/64, 2*Ckv].
    dout is bf16 [B*T, C], qkv bf16 [B*T, D], lse and delta are fp32 [B, NH, T].  Return part's rows.
    """
    B, NH, T = lse.shape
    blocks, vectors = T // HEAD, (describe(t.view(B * NH, T), 1, HEAD) for t in (lse, delta))
    _attention_dkdv_grouped_kernel[(blocks * B * NH // group,)](
        *dqkv.described(), part, describe(dout, HEAD, HEAD), describe(qkv, HEAD, HEAD), *vectors, rope, NH,
        T=T, GROUP=group, **OPTIONS,
    )  # fmt: skip
    return B * blocks
