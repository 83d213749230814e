"""Causal attention on packed qkv, without the score matrix (FlashAttention-2, https://arxiv.org/abs/2307.08691).

forward    s = q @ k.T / sqrt(HS),  s[i, j] = -inf for j > i,  p = softmax(s),  out = p @ v
           lse = log2(sum_j 2^(s * log2(e)))
backward   delta = rowsum(dout * out),  p = 2^(s * log2(e) - lse),  ds = p * (dout @ v.T - delta)
           dv = p.T @ dout,  dk = ds.T @ q / sqrt(HS),  dq = ds @ k / sqrt(HS),  dbias (+)= column sums of (dq, dk, dv)

qkv is [B*T, 3, NH, HS], out [B*T, NH, HS], lse and delta fp32 [B, NH, T].  Only lse is kept for the backward pass.
The scale and log2(e) are folded into one factor of the scores, so that exponentials are exp2.  p and ds are rounded
to the stored dtype before they are multiplied.  The backward pass is two kernels, one program per block of queries
(delta, dq) and then one per block of keys (dk, dv): 7 products where 5 would do, but every output has one writer, so
no atomics and the same bits every time.  Head sizes 80 and 96 run in blocks of 128 columns, of which the rest is
masked: 1.6 and 1.33 times the arithmetic.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.dot import dot
from gpt2_triton.kernels.reduce import column_sums
from gpt2_triton.kernels.tuned import dtype_name, next_power_of_2, tuned

_LOG2E = math.log2(math.e)


@triton.jit
def _load_rows(base_ptr, rows, stride, T, HS: tl.constexpr, BLOCK_D: tl.constexpr, FULL: tl.constexpr):
    """[rows, BLOCK_D] of one head, zero past the sequence's end and past the head's size."""
    d = tl.arange(0, BLOCK_D)
    ptr = base_ptr + rows[:, None] * stride + d[None, :]
    if FULL:
        return tl.load(ptr)
    return tl.load(ptr, mask=(rows < T)[:, None] & (d < HS)[None, :], other=0.0)


@triton.jit
def _store_rows(base_ptr, rows, stride, value, T, HS: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (d < HS)[None, :]
    tl.store(base_ptr + rows[:, None] * stride + d[None, :], value.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(q, k, v, m, total, acc, i, j, factor, MASKED: tl.constexpr):
    """One block of keys into the running maximum m, sum and output (log2 domain)."""
    s = dot(q, tl.trans(k)) * factor
    if MASKED:
        s = tl.where(i[:, None] >= j[None, :], s, -1.0e30)
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    total = total * shrink + tl.sum(p, 1)
    acc = dot(p.to(v.dtype), v, acc * shrink[:, None])
    return m_new, total, acc


@triton.jit
def _attention_fwd_kernel(
    out_ptr, lse_ptr, qkv_ptr, T, NH, factor,
    HS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_M % BLOCK_N == 0)  # the blocks before `first` are taken whole, without a mask
    blocks = tl.cdiv(T, BLOCK_M)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # the longest rows first: short ones fill the tail
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // NH, bh % NH
    C = NH * HS
    qkv_ptr += b * T * 3 * C + h * HS
    i = first + tl.arange(0, BLOCK_M)
    q = _load_rows(qkv_ptr, i, 3 * C, T, HS, BLOCK_D, FULL)
    m = tl.full((BLOCK_M,), -1.0e30, tl.float32)  # finite, so that a row is never inf - inf
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(0, first, BLOCK_N):  # keys that every query of the block sees
        j = start + tl.arange(0, BLOCK_N)
        k = _load_rows(qkv_ptr + C, j, 3 * C, T, HS, BLOCK_D, FULL)
        v = _load_rows(qkv_ptr + 2 * C, j, 3 * C, T, HS, BLOCK_D, FULL)
        m, total, acc = _attend(q, k, v, m, total, acc, i, j, factor, False)
    for start in tl.range(first, min(first + BLOCK_M, T), BLOCK_N):  # the diagonal
        j = start + tl.arange(0, BLOCK_N)
        k = _load_rows(qkv_ptr + C, j, 3 * C, T, HS, BLOCK_D, FULL)
        v = _load_rows(qkv_ptr + 2 * C, j, 3 * C, T, HS, BLOCK_D, FULL)
        m, total, acc = _attend(q, k, v, m, total, acc, i, j, factor, True)
    _store_rows(out_ptr + b * T * C + h * HS, i, C, acc / total[:, None], T, HS, BLOCK_D)
    tl.store(lse_ptr + bh * T + i, m + tl.log2(total), mask=i < T)


@triton.jit
def _attention_bwd_dq_kernel(
    dqkv_ptr, part_ptr, delta_ptr, dout_ptr, qkv_ptr, out_ptr, lse_ptr, T, NH, factor, scale,
    HS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(T, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // NH, bh % NH
    C = NH * HS
    qkv_ptr += b * T * 3 * C + h * HS
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load_rows(qkv_ptr, i, 3 * C, T, HS, BLOCK_D, FULL)
    dout = _load_rows(dout_ptr + b * T * C + h * HS, i, C, T, HS, BLOCK_D, FULL)
    out = _load_rows(out_ptr + b * T * C + h * HS, i, C, T, HS, BLOCK_D, FULL)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + bh * T + i, delta, mask=i < T)
    lse = tl.load(lse_ptr + bh * T + i, mask=i < T, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(0, min((block + 1) * BLOCK_M, T), BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k = _load_rows(qkv_ptr + C, j, 3 * C, T, HS, BLOCK_D, FULL)
        v = _load_rows(qkv_ptr + 2 * C, j, 3 * C, T, HS, BLOCK_D, FULL)
        p = tl.exp2(dot(q, tl.trans(k)) * factor - lse[:, None])
        if start + BLOCK_N > block * BLOCK_M:  # the diagonal
            p = tl.where(i[:, None] >= j[None, :], p, 0.0)
        ds = p * (dot(dout, tl.trans(v)) - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq)
    dq *= scale
    _store_rows(dqkv_ptr + b * T * 3 * C + h * HS, i, 3 * C, dq, T, HS, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    tl.store(part_ptr + (b * blocks + block) * C + h * HS + d, tl.sum(dq, 0), mask=d < HS)


@triton.jit
def _attention_bwd_dkdv_kernel(
    dqkv_ptr, part_ptr, dout_ptr, qkv_ptr, lse_ptr, delta_ptr, T, NH, factor, scale,
    HS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(T, BLOCK_N)
    block = tl.program_id(0) % blocks  # the first keys are seen by the most queries and start first
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // NH, bh % NH
    C = NH * HS
    qkv_ptr += b * T * 3 * C + h * HS
    dout_ptr += b * T * C + h * HS
    j = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _load_rows(qkv_ptr + C, j, 3 * C, T, HS, BLOCK_D, FULL)
    v = _load_rows(qkv_ptr + 2 * C, j, 3 * C, T, HS, BLOCK_D, FULL)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in tl.range(block * BLOCK_N, T, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        q = _load_rows(qkv_ptr, i, 3 * C, T, HS, BLOCK_D, FULL)
        dout = _load_rows(dout_ptr, i, C, T, HS, BLOCK_D, FULL)
        lse = tl.load(lse_ptr + bh * T + i, mask=i < T, other=0.0)
        delta = tl.load(delta_ptr + bh * T + i, mask=i < T, other=0.0)
        p = tl.exp2(dot(k, tl.trans(q)) * factor - lse[None, :])  # transposed: [keys, queries]
        if start < (block + 1) * BLOCK_N:  # the diagonal
            p = tl.where(i[None, :] >= j[:, None], p, 0.0)
        dv = dot(p.to(dout.dtype), dout, dv)
        ds = p * (dot(v, tl.trans(dout)) - delta[None, :])
        dk = dot(ds.to(q.dtype), q, dk)
    dk *= scale
    at = b * T * 3 * C + h * HS
    _store_rows(dqkv_ptr + at + C, j, 3 * C, dk, T, HS, BLOCK_D)
    _store_rows(dqkv_ptr + at + 2 * C, j, 3 * C, dv, T, HS, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    part_ptr += (b * blocks + block) * 2 * C + h * HS + d
    tl.store(part_ptr, tl.sum(dk, 0), mask=d < HS)
    tl.store(part_ptr + C, tl.sum(dv, 0), mask=d < HS)


def _shape(qkv: Tensor, lse: Tensor) -> tuple[dict[str, int], float]:
    """The sizes every kernel takes, and 1 / sqrt(HS)."""
    NH, T = lse.shape[1:]
    HS = qkv.shape[1] // (3 * NH)
    return dict(T=T, NH=NH, HS=HS, BLOCK_D=max(16, next_power_of_2(HS))), 1.0 / math.sqrt(HS)


def _row(op: str, dtype: str, T: int, HS: int) -> dict[str, int]:
    """Blocks, and whether they cover T and HS exactly: then no load of a row needs a mask."""
    row = tuned(op if HS <= 64 else f"{op}_wide", dtype, BLOCK_M=T, BLOCK_N=T)
    return row | dict(FULL=T % row["BLOCK_M"] == T % row["BLOCK_N"] == 0 and HS == next_power_of_2(HS))


@contract("out[B*T,C] lse[B,NH,T] <- qkv[B*T,3*C]")
def attention_fwd(out: Tensor, lse: Tensor, qkv: Tensor) -> None:
    """out = causal attention of packed qkv; lse, fp32, is what the backward pass needs of the softmax."""
    sizes, scale = _shape(qkv, lse)
    B, NH, T = lse.shape
    row = _row("attention_fwd", dtype_name(qkv), T, sizes["HS"])
    programs = triton.cdiv(T, row["BLOCK_M"]) * B * NH
    _attention_fwd_kernel[(programs,)](out, lse, qkv, factor=scale * _LOG2E, **sizes, **row)


@contract("dqkv[B*T,3*C] dbias[3*C]+ delta[B,NH,T] scratch[*] <- dout[B*T,C] qkv[B*T,3*C] out[B*T,C] lse[B,NH,T]")
def attention_bwd(
    dqkv: Tensor, dbias: Tensor, delta: Tensor, scratch: Tensor,
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, acc: bool,
) -> None:  # fmt: skip
    """dqkv from dout; dbias (+)= its column sums, before rounding; delta is workspace."""
    sizes, scale = _shape(qkv, lse)
    (B, NH, T), C, dtype = lse.shape, out.shape[1], dtype_name(qkv)
    factors = dict(factor=scale * _LOG2E, scale=scale)
    row = _row("attention_bwd_dq", dtype, T, sizes["HS"])
    blocks = triton.cdiv(T, row["BLOCK_M"])
    _attention_bwd_dq_kernel[(blocks * B * NH,)](dqkv, scratch, delta, dout, qkv, out, lse, **factors, **sizes, **row)
    column_sums(dbias[:C], scratch, B * blocks, acc)
    row = _row("attention_bwd_dkdv", dtype, T, sizes["HS"])
    blocks = triton.cdiv(T, row["BLOCK_N"])
    _attention_bwd_dkdv_kernel[(blocks * B * NH,)](dqkv, scratch, dout, qkv, lse, delta, **factors, **sizes, **row)
    column_sums(dbias[C:], scratch, B * blocks, acc)


def attention_bwd_scratch(B: int, T: int, C: int, HS: int, dtype: str) -> int:
    """fp32 elements: column sums of dq per block of queries; later, twice as wide, of dk and dv per block of keys."""
    keys = triton.cdiv(T, _row("attention_bwd_dkdv", dtype, T, HS)["BLOCK_N"])
    queries = triton.cdiv(T, _row("attention_bwd_dq", dtype, T, HS)["BLOCK_M"])
    return B * C * max(2 * keys, queries)
