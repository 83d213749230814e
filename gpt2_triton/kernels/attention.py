"""Causal attention on packed qkv, without the score matrix (FlashAttention-2,
https://arxiv.org/abs/2307.08691).

forward    s = q @ k.T / sqrt(HS),  s[i, j] = -inf for j > i,  p = softmax(s),  out = p @ v
           lse = log2(sum_j 2^(s * log2(e)))
backward   delta = rowsum(dout * out),  p = 2^(s * log2(e) - lse),  ds = p * (dout @ v.T - delta)
           dv = p.T @ dout,  dk = ds.T @ q / sqrt(HS),  dq = ds @ k / sqrt(HS),
           dbias (+)= column sums of (dq, dk, dv)

qkv is [B*T, NH + 2 * NKV, HS], out [B*T, NH, HS], lse and delta fp32 [B, NH, T].  The query heads
share NKV heads of k and v, GROUP = NH / NKV each; GROUP is 1 without such groups.  Only lse is kept
for the backward pass.  A block holds rows of one head (blocks.py).  Past the end of a sequence or a
head, zeros are read and nothing is written, so scores need masks only for causality.  lse and delta
are not described but masked: TMA requires rows that begin on 16 bytes, and T numbers may end
elsewhere.  qkv has the heads of q, then of k, then of v.

Scores are multiplied by log2(e) / sqrt(HS), so that exp2 replaces exp.  p and ds are rounded to the
stored dtype before they are multiplied.  The backward pass is two kernels: the first has a program
per block of queries (delta, dq), the second a program per block of keys (dk, dv).  They compute 7
products where 5 would do.  But each output has one writer: there are no atomics, and two runs have
equal bits.  A program of dk and dv adds up a group's heads in their order.
With `rope` the gradients of q and k are rotated back (rope.py), and taken through their norm if
they have one (qk_norm.py).  Heads of 80 and 96 columns run in
blocks of 128, with zeros.  On Hopper, hopper.takes decides which passes run in the kernels of
hopper/: bf16 with heads of 64 columns, in whole blocks of 64 tokens.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels import hopper
from gpt2_triton.kernels.blocks import (
    Blocks,
    copies_ahead,
    describe,
    load_block,
    rounded,
    store_block,
)
from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import LOG2E, dot
from gpt2_triton.kernels.e4m3 import quantise
from gpt2_triton.kernels.epilogue import RopeArguments
from gpt2_triton.kernels.fp8 import (
    Operand,
    describe_heads,
    full,
    in_fp8,
    store_columns,
    store_heads,
    stored,
)
from gpt2_triton.kernels.hopper import attention_dkdv, attention_dq
from gpt2_triton.kernels.hopper.attention_fwd import attention_fwd as hopper_fwd
from gpt2_triton.kernels.hopper.pipeline import Forms
from gpt2_triton.kernels.qk_norm import PARTS, input_gradient, noise, weight_gradient
from gpt2_triton.kernels.reduce import column_sums
from gpt2_triton.kernels.table_file import Row
from gpt2_triton.kernels.tuning import dtype_name, next_power_of_2, tuned
from gpt2_triton.operands import Rope


@triton.jit
def _load_kv(kv_desc, b, h, start, NH, GROUP: tl.constexpr):
    """Return the blocks of k and v, from token `start` on, that head h of q reads."""
    k_head = NH + h // GROUP
    k = load_block(kv_desc, [b, k_head, start, 0])
    v_head = NH + NH // GROUP + h // GROUP
    v = load_block(kv_desc, [b, v_head, start, 0])
    return k, v


@triton.jit
def _online_softmax_step(s, v, m, total, acc, factor):
    """Return the running maximum m, sum and output after one more block of scores (log2 domain)."""
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    p = tl.exp2(s * factor - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    # 8 partial sums a row: four lanes hold a row of scores, and no lane
    # waits for another (4% less time)
    total = total * rescale[:, None] + tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 8), 1)
    acc = dot(p.to(v.dtype), v, acc * rescale[:, None])
    return m_new, total, acc


@triton.jit
def _attention_fwd_kernel(
    out_desc, out8_desc, scale_ptr, amax_ptr, lse_ptr, q_desc, kv_desc, T, NH, factor,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # the blocks before `first` are taken whole, without a mask
    tl.static_assert(BLOCK_M % BLOCK_N == 0)
    blocks = tl.cdiv(T, BLOCK_M)
    # most keys first: blocks with few keys fill the end
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    bh = tl.program_id(0) // blocks
    b = bh // NH
    h = bh % NH
    i = first + tl.arange(0, BLOCK_M)
    # q_desc is [B, T, heads, HS], the other descriptors [B, heads, T, HS].  So this reshape is no
    # view, and keeps q in registers.  With a view, each product would read q from shared memory
    # again, which takes 10% longer.
    q = load_block(q_desc, [b, first, h, 0])
    m = tl.full((BLOCK_M,), -1.0e30, tl.float32)  # finite, so that no row becomes inf - inf
    total = tl.zeros((BLOCK_M, 8), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(0, first, BLOCK_N):  # keys that every query of the block sees
        k, v = _load_kv(kv_desc, b, h, start, NH, GROUP)
        m, total, acc = _online_softmax_step(dot(q, k.T), v, m, total, acc, factor)
    for start in tl.range(first, first + BLOCK_M, BLOCK_N):  # the diagonal
        k, v = _load_kv(kv_desc, b, h, start, NH, GROUP)
        ahead = i - start  # with `start` beside its keys, masks would be compared in 64 bits
        seen = ahead[:, None] >= tl.arange(0, BLOCK_N)[None, :]
        s = tl.where(seen, dot(q, k.T), -1.0e30)
        m, total, acc = _online_softmax_step(s, v, m, total, acc, factor)
    sums = tl.sum(total, 1)
    out = rounded(acc / sums[:, None], out_desc)
    store_block(out_desc, [b, h, first, 0], out)
    if out8_desc is not None:  # cast the rounded out: a later cast of out gives the same bits
        out = tl.where(i[:, None] < T, out.to(tl.float32), 0.0)
        store_block(out8_desc, [b, h, first, 0], quantise(out, scale_ptr, amax_ptr))
    tl.store(lse_ptr + bh.to(tl.int64) * T + i, m + tl.log2(sums), mask=i < T)


@triton.jit
def _attention_bwd_dq_kernel(
    dqkv_desc, columns_desc, scale_ptr, amax_ptr, out_columns_desc, part_ptr, delta_ptr, dout_desc,
    q_desc, kv_desc, out_desc, out_scale_ptr, lse_ptr, rope_ptr, norm_ptr, rstd_ptr, T, NH, factor,
    scale, NOISE: tl.constexpr, GROUP: tl.constexpr, HS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(T, BLOCK_M)
    block = blocks - 1 - tl.program_id(0) % blocks
    bh = tl.program_id(0) // blocks
    b = bh // NH
    h = bh % NH
    first = block * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    at = bh.to(tl.int64) * T + i
    dout = load_block(dout_desc, [b, h, first, 0])
    out = load_block(out_desc, [b, h, first, 0]).to(tl.float32)
    if out_columns_desc is not None:
        store_columns(out_columns_desc, out_scale_ptr, b, h, first, out)
    delta = tl.sum(out * dout.to(tl.float32), 1)
    tl.store(delta_ptr + at, delta, mask=i < T)
    lse = tl.load(lse_ptr + at, mask=i < T, other=0.0)
    q = load_block(q_desc, [b, h, first, 0])
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(0, first + BLOCK_M, BLOCK_N):
        k, v = _load_kv(kv_desc, b, h, start, NH, GROUP)
        p = tl.exp2(dot(q, k.T) * factor - lse[:, None])
        if start + BLOCK_N > first:  # the diagonal
            p = tl.where(i[:, None] >= (start + tl.arange(0, BLOCK_N))[None, :], p, 0.0)
        ds = p * (dot(dout, v.T) - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq)
    dq, terms = input_gradient(
        dq, scale, q_desc, [b, h, first, 0], T, NH + NH // GROUP, rope_ptr, norm_ptr, 0, rstd_ptr,
        NOISE, HS,
    )  # fmt: skip
    if part_ptr is not None:
        d = tl.arange(0, BLOCK_D)
        tl.store(part_ptr + ((b * blocks + block) * NH + h) * HS + d, tl.sum(terms, 0), mask=d < HS)
    store_heads(dqkv_desc, columns_desc, scale_ptr, amax_ptr, b, h, first, dq)


@triton.jit
def _attention_bwd_dkdv_kernel(
    dqkv_desc, columns_desc, scale_ptr, amax_ptr, part_ptr, dout_desc, q_desc, kv_desc, lse_ptr,
    delta_ptr, rope_ptr, norm_ptr, rstd_ptr, T, NH, factor, scale, NOISE: tl.constexpr,
    GROUP: tl.constexpr, HS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # blocks of queries start where the block of keys starts
    tl.static_assert(BLOCK_N % BLOCK_M == 0)
    blocks = tl.cdiv(T, BLOCK_N)
    block = tl.program_id(0) % blocks  # the first keys are seen by the most queries and start first
    NKV = NH // GROUP
    bkv = tl.program_id(0) // blocks
    b = bkv // NKV
    kv = bkv % NKV
    first = block * BLOCK_N
    j = first + tl.arange(0, BLOCK_N)
    k_head = NH + kv
    k = load_block(kv_desc, [b, k_head, first, 0])
    v_head = NH + NKV + kv
    v = load_block(kv_desc, [b, v_head, first, 0])
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP):
        h = kv * GROUP + member
        at = (b * NH + h).to(tl.int64) * T
        for start in tl.range(first, T, BLOCK_M):
            i = start + tl.arange(0, BLOCK_M)
            q = load_block(q_desc, [b, h, start, 0])
            dout = load_block(dout_desc, [b, h, start, 0])
            lse = tl.load(lse_ptr + at + i, mask=i < T, other=0.0)
            delta = tl.load(delta_ptr + at + i, mask=i < T, other=0.0)
            p = tl.exp2(dot(k, q.T) * factor - lse[None, :])  # transposed: [keys, queries]
            if copies_ahead(q_desc):  # a branch takes registers, and more time than the masks
                p = tl.where(i[None, :] >= j[:, None], p, 0.0)
            elif start < first + BLOCK_N:  # the diagonal
                p = tl.where(i[None, :] >= j[:, None], p, 0.0)
            dv = dot(p.to(dout.dtype), dout, dv)
            if copies_ahead(q_desc):  # what follows a product, but not the start of its sum
                ds = p * (dot(v, dout.T) - delta[None, :])
            else:
                # starting the sum at -delta saves a subtraction, and registers
                ds = p * dot(v, dout.T, tl.zeros_like(p) - delta[None, :])
            dk = dot(ds.to(q.dtype), q, dk)
    # dv first: dk's norm takes its registers
    store_heads(dqkv_desc, columns_desc, scale_ptr, amax_ptr, b, v_head, first, dv)
    d = tl.arange(0, BLOCK_D)
    dk, terms = input_gradient(
        dk, scale, kv_desc, [b, k_head, first, 0], T, NH + NKV, rope_ptr, norm_ptr, 1, rstd_ptr,
        NOISE, HS,
    )  # fmt: skip
    if norm_ptr is not None:
        tl.store(part_ptr + ((b * blocks + block) * NKV + kv) * HS + d, tl.sum(terms, 0))
    elif part_ptr is not None:
        part_ptr += ((b * blocks + block) * 2 * NKV + kv) * HS + d
        tl.store(part_ptr + NKV * HS, tl.sum(dv, 0), mask=d < HS)
        tl.store(part_ptr, tl.sum(dk, 0), mask=d < HS)
    store_heads(dqkv_desc, columns_desc, scale_ptr, amax_ptr, b, k_head, first, dk)


class _Sizes(NamedTuple):
    """The sizes of a launch."""

    B: int
    NH: int
    T: int
    HS: int
    GROUP: int  # heads of q that share a head of k and v

    @classmethod
    def of(cls, qkv: Tensor, C: int, lse: Tensor) -> "_Sizes":
        B, NH, T = lse.shape
        HS = C // NH
        return cls(B, NH, T, HS, 2 * NH // (qkv.shape[1] // HS - NH))

    def tokens(self, tensor: Tensor) -> Tensor:
        """View [B*T, heads*HS] as [B, T, heads, HS]."""
        return tensor.view(self.B, self.T, -1, self.HS)

    def rows(self, tensor: Tensor, row: Row, block: str) -> Blocks | None:
        """Describe [B*T, heads*HS] as [B, heads, T, HS], in blocks of row[block] rows of a head."""
        longest = max(row["BLOCK_M"], row["BLOCK_N"])
        reach = 1, 1, longest, row["BLOCK_D"]
        heads = self.tokens(tensor).transpose(1, 2)
        return describe(heads, 1, 1, row[block], row["BLOCK_D"], reach=reach)


def _row(op: str, dtype: str, T: int, HS: int) -> Row:
    """Return the launch parameters of the table of the GPU at hand (tuning.py)."""
    row = tuned(op if HS <= 64 else f"{op}_wide", dtype, BLOCK_M=T, BLOCK_N=T)
    return row | dict(BLOCK_D=next_power_of_2(HS))


@contract("out[B*T,C] lse[B,NH,T] <- qkv[B*T,D]")
def attention_fwd(out: Operand, lse: Tensor, qkv: Tensor) -> None:
    """out = causal attention of packed qkv; lse, fp32, is for the backward pass."""
    s = _Sizes.of(qkv, out.shape[1], lse)
    dtype = dtype_name(qkv)
    out8, *scaling = in_fp8(out)
    if hopper.takes("attention_fwd", s.T, s.HS, dtype):
        return hopper_fwd(full(out), out8, *scaling, lse, qkv, s.GROUP)
    row = _row("attention_fwd", dtype, s.T, s.HS)
    programs = triton.cdiv(s.T, row["BLOCK_M"]) * s.B * s.NH
    _attention_fwd_kernel[(programs,)](
        s.rows(full(out), row, "BLOCK_M"), None if out8 is None else s.rows(out8, row, "BLOCK_M"),
        *scaling, lse, describe(s.tokens(qkv), 1, row["BLOCK_M"], 1, row["BLOCK_D"]),
        s.rows(qkv, row, "BLOCK_N"), s.T, s.NH, LOG2E.value / math.sqrt(s.HS), GROUP=s.GROUP, **row,
    )  # fmt: skip


def _bwd_row(op: str, dtype: str, T: int, HS: int) -> Row:
    """Return a kernel's launch parameters, with the blocks of hopper/ where that takes it."""
    return _row(op, dtype, T, HS) | hopper.blocks(op, T, HS, dtype)


def _bwd_parameters(op: str, s: _Sizes, qkv: Tensor, rope: RopeArguments) -> dict[str, Any]:
    """Return the launch parameters of a kernel, and the numbers that both kernels take."""
    row = _bwd_row(op, dtype_name(qkv), s.T, s.HS)
    if rope.w is not None:
        row.pop("maxnreg", None)  # it leaves too few registers for the norm
    scale = 1.0 / math.sqrt(s.HS)
    sizes = dict(T=s.T, NH=s.NH, factor=scale * LOG2E.value, scale=scale, GROUP=s.GROUP, HS=s.HS)
    return row | sizes | dict(NOISE=noise(qkv))


def _launch_dq(
    s: _Sizes, dqkv: Operand, part: Tensor | None, delta: Tensor, dout: Tensor, qkv: Tensor,
    out: Operand, lse: Tensor, rope: RopeArguments,
) -> int:  # fmt: skip
    """Write dq, delta, out's columns, and part, for each block of queries the column sums of dq,
    or the terms of the norm's dw; return part's rows.
    """
    if hopper.takes("attention_bwd_dq", s.T, s.HS, dtype_name(qkv)):
        return attention_dq.attention_bwd_dq(
            Forms.of(dqkv), part, delta, dout, qkv, Forms.of(out), full(out), lse, rope, s.GROUP
        )
    row = _bwd_parameters("attention_bwd_dq", s, qkv, rope)
    blocks = triton.cdiv(s.T, row["BLOCK_M"])
    rows, *scaling = stored(dqkv)
    dq_desc, dout_desc, q_desc, out_desc = (
        s.rows(t, row, "BLOCK_M") for t in (rows, dout, qkv, full(out))
    )
    columns, out_columns = (describe_heads(t, lse.shape, s.HS, row["BLOCK_M"]) for t in (dqkv, out))
    _attention_bwd_dq_kernel[(blocks * s.B * s.NH,)](
        dq_desc, columns, *scaling, out_columns, part, delta, dout_desc, q_desc,
        s.rows(qkv, row, "BLOCK_N"), out_desc, stored(out)[1], lse, rope.table, rope.w, rope.rstd,
        **row,
    )  # fmt: skip
    return s.B * blocks


def _launch_dkdv(
    s: _Sizes, dqkv: Operand, part: Tensor | None, dout: Tensor, qkv: Tensor, lse: Tensor,
    delta: Tensor, rope: RopeArguments,
) -> int:  # fmt: skip
    """Write dk, dv and part, for each block of keys their column sums, or for dk the terms of the
    norm's dw; return part's rows.
    """
    if hopper.takes("attention_bwd_dkdv", s.T, s.HS, dtype_name(qkv)):
        return attention_dkdv.attention_bwd_dkdv(
            Forms.of(dqkv), part, dout, qkv, lse, delta, rope, s.GROUP
        )
    row = _bwd_parameters("attention_bwd_dkdv", s, qkv, rope)
    blocks = triton.cdiv(s.T, row["BLOCK_N"])
    rows, *scaling = stored(dqkv)
    _attention_bwd_dkdv_kernel[(blocks * s.B * s.NH // s.GROUP,)](
        s.rows(rows, row, "BLOCK_N"), describe_heads(dqkv, lse.shape, s.HS, row["BLOCK_N"]),
        *scaling, part, s.rows(dout, row, "BLOCK_M"), s.rows(qkv, row, "BLOCK_M"),
        s.rows(qkv, row, "BLOCK_N"), lse, delta, rope.table, rope.w, rope.rstd, **row,
    )  # fmt: skip
    return s.B * blocks


@contract(
    "dqkv[B*T,D] dbias[D]?+ rope.norm.dw[2,HS]?+ delta[B,NH,T] scratch[*] <- dout[B*T,C] "
    "qkv[B*T,D] out[B*T,C] lse[B,NH,T] rope.table[Tr,HS]? rope.norm.w[2,HS]? rope.norm.rstd[B*T,H]?"
)
def attention_bwd(
    dqkv: Operand, dbias: Tensor | None, delta: Tensor, scratch: Tensor,
    dout: Tensor, qkv: Tensor, out: Operand, lse: Tensor, acc: bool, rope: Rope | None = None,
) -> None:  # fmt: skip
    """Write dqkv, and dbias (+)= the column sums of dqkv before rounding; delta is workspace.  With
    `rope`, q and k of qkv are rotated, and dqkv is the gradient before the rotation, and before its
    norm, whose dw (+)= the gradient of the weights; a norm has no dbias beside it.

    An `out` in fp8 with `transposed` also gets its columns, which the forward pass does
    not write: dQ reads out anyway.
    """
    arguments = RopeArguments.of(rope)
    norm = None if rope is None else rope.norm
    C = out.shape[1]
    s = _Sizes.of(qkv, C, lse)
    part = None if dbias is None else scratch
    if norm is not None:
        part = scratch[2 * PARTS * s.HS :]
    rows = _launch_dq(s, dqkv, part, delta, dout, qkv, out, lse, arguments)
    if dbias is not None:
        column_sums(dbias[:C], None, None, scratch, rows, acc)
    elif norm is not None:
        q_rows = rows * norm.NH
        part = part[q_rows * s.HS :]
    rows = _launch_dkdv(s, dqkv, part, dout, qkv, lse, delta, arguments)
    if dbias is not None:
        column_sums(dbias[C:], None, None, scratch, rows, acc)
    elif norm is not None:
        k_rows = rows * (norm.rstd.shape[1] - norm.NH)
        weight_gradient(norm, scratch, q_rows, k_rows, 1.0 / math.sqrt(s.HS), acc)


def attention_bwd_scratch(B: int, T: int, C: int, HS: int, dtype: str, normed: bool = False) -> int:
    """Return the fp32 elements: column sums of dq per block of queries, then of dk
    and dv per block of keys; with normed heads, terms of dw beside each other.
    """
    keys = triton.cdiv(T, _bwd_row("attention_bwd_dkdv", dtype, T, HS)["BLOCK_N"])
    queries = triton.cdiv(T, _bwd_row("attention_bwd_dq", dtype, T, HS)["BLOCK_M"])
    if not normed:
        return B * C * max(2 * keys, queries)
    # a program of Hopper's leaves two rows
    return 2 * (B * C * (keys + queries) + PARTS * HS)
