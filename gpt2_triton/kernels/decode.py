"""Decoding: the forward pass of one token for each of B sequences, with
keys and values from a cache.

decode_embed      x = wte[token] (+ wpe[row])
decode_matmul     out = [act]([norm](x) @ w.T + b) [+ res]; the norm is
                  LayerNorm, or RMSNorm without lnb; up to NARROW_ROWS rows
decode_attention  cache[row] = k, v of qkv;
                  att = softmax(q @ cache.k[..row].T / sqrt(HS)) @ cache.v[..row]
cache_fill        cache = k, v of a whole sequence, which the forward pass has left in qkv, for
                  each sequence that `filled` names

The state of a sequence is a row of `seq`, int32 [B, 5] on the device.  It holds the last token, the
token's row in the cache, the number of tokens sampled (sampling.py), and the low and high 31 bits
of the seed.  So all steps have the same launches, and one CUDA graph replays them.  cache is [B, T,
2, Ckv], one per layer; Ckv holds the heads of k or v, which the heads of q share in groups.  With
`rope` q and k are rotated first (rope.py), and normed before that if it has a norm (qk_norm.py);
the cache holds k as attention reads it.

Reading the weights bounds a step; with few sequences, so does the number of launches, five per
layer.  Up to NARROW_ROWS sequences, a program of a product holds whole rows of weights in registers
and takes one sequence after the other.  A result then does not depend on the number of sequences.
To save launches, each program reads its input rows from L2 and norms them itself.  More sequences
go through tensor cores; there the norm is a launch of its own, which takes less time than the norms
of all programs.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import LOG2E, activation, dot, soft_cap
from gpt2_triton.kernels.epilogue import RopeArguments
from gpt2_triton.kernels.fp8 import full
from gpt2_triton.kernels.tuning import dtype_name, next_power_of_2, tuned
from gpt2_triton.operands import NARROW_ROWS, Linear, Norm, Operand, Rope

FIELDS = tl.constexpr(5)  # of a row of seq
TOKEN, ROW, DRAWN, SEED_LOW, SEED_HIGH = (tl.constexpr(i) for i in range(5))


@triton.jit
def _decode_embed_kernel(x_ptr, seq_ptr, wte_ptr, wpe_ptr, C, BLOCK_C: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    token = tl.load(seq_ptr + b * FIELDS + TOKEN).to(tl.int64)
    row = tl.load(seq_ptr + b * FIELDS + ROW).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    x = tl.load(wte_ptr + token * C + c, mask=c < C, other=0.0).to(tl.float32)
    if wpe_ptr is not None:
        x += tl.load(wpe_ptr + row * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(x_ptr + b * C + c, x, mask=c < C)


@triton.jit
def _finish(acc, out_ptr, b_ptr, res_ptr, at, mask, n, N, ACT: tl.constexpr, CAP: tl.constexpr):
    """Store res + act(acc + b), capped, at the offsets `at`; n holds the indices of acc's last
    dimension.
    """
    if b_ptr is not None:
        acc += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if ACT != "":
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        acc = activation(acc.to(dtype).to(tl.float32), ACT, dtype)  # training rounds before it, too
    if res_ptr is not None:
        acc += tl.load(res_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if CAP != 0:
        acc, _ = soft_cap(acc, 1.0, CAP)
    tl.store(out_ptr + at, acc, mask=mask)


@triton.jit
def _decode_matvec_kernel(
    out_ptr, x_ptr, w_ptr, b_ptr, lnw_ptr, lnb_ptr, res_ptr, B, N, K, eps,
    ACT: tl.constexpr, CAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w = tl.load(
        w_ptr + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0
    )
    for m in range(B):
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if lnw_ptr is not None:
            lnw = tl.load(lnw_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            if lnb_ptr is not None:
                x = tl.where(k < K, x - tl.sum(x, 0) / K, 0.0)
            rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
            x = x * rstd * lnw
            if lnb_ptr is not None:
                x += tl.load(lnb_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
        acc = tl.sum(w.to(tl.float32) * x[None, :], 1)
        _finish(acc, out_ptr, b_ptr, res_ptr, m * N + n, n < N, n, N, ACT, CAP)
        x_ptr += K


@triton.jit
def _decode_matmul_kernel(
    out_ptr, x_ptr, w_ptr, b_ptr, res_ptr, B, N, K, ACT: tl.constexpr, CAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = (first + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k, mask=(m < B)[:, None] & (k < K), other=0.0)
        w = tl.load(w_ptr + n[:, None] * K + k, mask=(n < N)[:, None] & (k < K), other=0.0)
        acc = dot(x, w.T, acc)
    at = m[:, None] * N + n[None, :]
    mask = (m < B)[:, None] & (n < N)[None, :]
    _finish(acc, out_ptr, b_ptr, res_ptr, at, mask, n, N, ACT, CAP)


@triton.jit
def _head(x_ptr, rope_ptr, norm_ptr, eps, d, HS):
    """Return a head of HS columns, in fp32; with rope_ptr, which points
    to its position, rotated, and with norm_ptr, its weights, normed before that.
    """
    x = tl.load(x_ptr + d, mask=d < HS, other=0.0).to(tl.float32)
    if rope_ptr is not None:
        half = HS // 2
        across = (d + half) % HS
        partner = tl.load(x_ptr + across, mask=d < HS, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HS + eps)
            x *= rstd * tl.load(norm_ptr + d, mask=d < HS, other=0.0).to(tl.float32)
            partner *= rstd * tl.load(norm_ptr + across, mask=d < HS, other=0.0).to(tl.float32)
        cos = tl.load(rope_ptr + d % half, mask=d < HS, other=0.0)
        sin = tl.load(rope_ptr + half + d % half, mask=d < HS, other=0.0)
        x = x * cos + tl.where(d < half, -partner, partner) * sin
    return x


@triton.jit
def _decode_attention_kernel(
    att_ptr, cache_ptr, qkv_ptr, seq_ptr, rope_ptr, norm_q_ptr, norm_k_ptr, eps, T, NH, HS, factor,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one head of one sequence in BLOCK_T slots, which are combined at the end."""
    b = tl.program_id(0).to(tl.int64) // NH
    h = tl.program_id(0) % NH
    C = NH * HS
    CKV = C // GROUP
    d = tl.arange(0, BLOCK_D)
    inside = d < HS
    shared = h // GROUP * HS  # the first column of the group's k or v
    row = tl.load(seq_ptr + b * FIELDS + ROW)
    qkv_ptr += b * (C + 2 * CKV)
    if rope_ptr is not None:
        rope_ptr += row * HS
    q = _head(qkv_ptr + h * HS, rope_ptr, norm_q_ptr, eps, d, HS) * factor
    k = _head(qkv_ptr + C + shared, rope_ptr, norm_k_ptr, eps, d, HS)
    v = _head(qkv_ptr + C + CKV + shared, None, None, eps, d, HS)
    cache_ptr += b * T * 2 * CKV + shared + d
    first_of_group = tl.where(inside, h % GROUP, 1) == 0
    tl.store(cache_ptr + row.to(tl.int64) * 2 * CKV, k, mask=first_of_group)
    tl.store(cache_ptr + row.to(tl.int64) * 2 * CKV + CKV, v, mask=first_of_group)
    # a slot keeps a maximum, a sum and an output (log2 domain); slot 0 begins with the new token
    slot = tl.arange(0, BLOCK_T)
    m = tl.where(slot == 0, tl.sum(q * k, 0), -1.0e30)  # finite, so that no slot becomes inf - inf
    total = tl.where(slot == 0, 1.0, 0.0)
    acc = tl.where((slot == 0)[:, None], v[None, :], 0.0)
    for first in tl.range(0, row, BLOCK_T, num_stages=STAGES):
        t = first + slot
        at = t.to(tl.int64)[:, None] * (2 * CKV)
        mask = (t < row)[:, None] & inside[None, :]
        ks = tl.load(cache_ptr[None, :] + at, mask=mask, other=0.0).to(tl.float32)
        vs = tl.load(cache_ptr[None, :] + at + CKV, mask=mask, other=0.0).to(tl.float32)
        s = tl.where(t < row, tl.sum(ks * q[None, :], 1), -1.0e30)
        m_new = tl.maximum(m, s)
        p = tl.exp2(s - m_new)
        rescale = tl.exp2(m - m_new)
        total = total * rescale + p
        acc = acc * rescale[:, None] + p[:, None] * vs
        m = m_new
    share = tl.exp2(m - tl.max(m, 0))  # 0 for a slot that saw no key
    out = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(att_ptr + b * C + h * HS + d, out, mask=inside)


@triton.jit
def _cache_fill_kernel(cache_ptr, qkv_ptr, filled_ptr, Tc, T, C, D, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    width = D - C  # of a token's k and v
    n = tl.cast(T, tl.int64) * width
    mask = (i < n) & (tl.load(filled_ptr + b) != 0)
    kv = tl.load(qkv_ptr + i // width * D + C + i % width, mask=mask, other=0.0)
    tl.store(cache_ptr + b * Tc * width + i, kv, mask=mask)


@contract("x[B,C] <- seq[B,5] wte[Vp,C] wpe[Tmax,C]?")
def decode_embed(x: Tensor, seq: Tensor, wte: Operand, wpe: Tensor | None) -> None:
    """x = wte[token] (+ wpe[row])."""
    B, C = x.shape
    _decode_embed_kernel[(B,)](x, seq, full(wte), wpe, C, BLOCK_C=next_power_of_2(C), num_warps=4)


@contract("out[B,N] <- x[B,K] layer.w[N,K] layer.b[N]? norm.w[K]? norm.b[K]? res[B,N]?")
def decode_matmul(
    out: Tensor,
    x: Operand,
    layer: Linear,
    norm: Norm | None = None,
    res: Tensor | None = None,
    act: str = "",
    cap: float = 0.0,
) -> None:
    """out = res + act(norm(x) @ w.T + b) of bf16 or fp32; None leaves out the norm or res, and a
    `cap` that is not 0 caps out.  Only up to NARROW_ROWS rows may have a norm.
    """
    x = full(x)
    w = full(layer.w)
    b = layer.b
    (B, K), N = x.shape, w.shape[0]
    if B <= NARROW_ROWS:
        lnw, lnb, eps = (None, None, 0.0) if norm is None else (norm.w, norm.b, norm.eps)
        row = tuned("decode_matvec", dtype_name(x))
        block_k = next_power_of_2(K)
        block_n = min(max(1, row.pop("ELEMENTS") // block_k), next_power_of_2(N))
        _decode_matvec_kernel[(triton.cdiv(N, block_n),)](
            out, x, w, b, lnw, lnb, res, B, N, K, eps, ACT=act, CAP=cap, BLOCK_N=block_n,
            BLOCK_K=block_k, **row,
        )  # fmt: skip
        return
    assert norm is None, f"{B} rows with a norm"
    row = tuned("decode_matmul", dtype_name(x), BLOCK_M=B, BLOCK_N=N, BLOCK_K=K)
    grid = (triton.cdiv(B, row["BLOCK_M"]), triton.cdiv(N, row["BLOCK_N"]))
    _decode_matmul_kernel[grid](out, x, w, b, res, B, N, K, ACT=act, CAP=cap, **row)


@contract("att[B,C] cache[B,T,2,Ckv]+ <- qkv[B,D] seq[B,5] rope.table[Tr,HS]? rope.norm.w[2,HS]?")
def decode_attention(
    att: Tensor, cache: Tensor, qkv: Tensor, seq: Tensor, NH: int, rope: Rope | None = None
) -> None:
    """cache[row] = k, v; att = attention of q over the cache up to this row."""
    (B, C), T = att.shape, cache.shape[1]
    HS = C // NH
    row = tuned("decode_attention", dtype_name(qkv), BLOCK_T=T)
    arguments = RopeArguments.of(rope)
    norm_q, norm_k = (None, None) if arguments.w is None else arguments.w
    _decode_attention_kernel[(B * NH,)](
        att, cache, qkv, seq, arguments.table, norm_q, norm_k, arguments.eps, T, NH, HS,
        LOG2E.value / math.sqrt(HS), GROUP=C // cache.shape[3], BLOCK_D=next_power_of_2(HS), **row,
    )  # fmt: skip


@contract("cache[B,Tc,2,Ckv]+ <- qkv[T,D] filled[B]")
def cache_fill(cache: Tensor, qkv: Tensor, filled: Tensor) -> None:
    """cache[b,:T] = k, v of the rows of qkv, for each b with filled[b] other than 0."""
    B, Tc, _, Ckv = cache.shape
    T, D = qkv.shape
    row = tuned("cache_fill", dtype_name(qkv), BLOCK=T * 2 * Ckv)
    _cache_fill_kernel[(triton.cdiv(T * 2 * Ckv, row["BLOCK"]), B)](
        cache, qkv, filled, Tc, T, D - 2 * Ckv, D, **row
    )
