"""Token and position embedding.

embedding_fwd  x[b*T + t] = wte[ids[b, t]] + wpe[t]; wpe may be None
embedding_bwd  dwte[v] += sum over r with ids[r] = v of dx[r]
               +  sum over r with targets[r] = v of ks[r] * lnf[r]
               dwpe[t] (+)= sum_b dx[b*T + t],  0 for t >= T

The second sum is the output head's gradient, as wte is the head's weight too; ks is the gradient of
the target's logit (classifier.py).  An untied head lies behind wte: dwte then has the rows of both,
and the targets' begin at Vp.

Rows that share a token collide, and atomic adds would add them in a different order in each run.
So the host sorts 2R entries by token (scatter_table of data/packing.py): entry e < R is row e of
dx, entry R + r is row r of lnf.  One program adds up a segment, at most 128 entries of one token.
A token with more entries has several segments: their sums go to `slots` of scratch, and a second
kernel adds the slots in order.  So each row of dwte has one writer and one order, and rows
without entries are not touched.  A CUDA graph replays the launches, so the tables have fixed
sizes: unused rows have length 0.

order         int32 [2R]    entries, sorted by token
segments      int32 [Ns,4]  token, first index in order, length, slot in scratch (-1: add to dwte)
split_tokens  int32 [Nh,4]  token, first slot, number of slots, 0
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.fp8 import Operand, full
from gpt2_triton.kernels.tuning import dtype_name, tuned
from gpt2_triton.operands import TokenRows


@triton.jit
def _embedding_fwd_kernel(
    x_ptr, ids_ptr, wte_ptr, wpe_ptr, R, T, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.load(ids_ptr + r, mask=r < R, other=0).to(tl.int64)
    for first in range(0, C, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mask = (r < R)[:, None] & (c < C)[None, :]
        wte = tl.load(wte_ptr + token[:, None] * C + c[None, :], mask=mask, other=0.0)
        x = wte.to(tl.float32)
        if wpe_ptr is not None:
            wpe = tl.load(wpe_ptr + (r % T)[:, None] * C + c[None, :], mask=mask, other=0.0)
            x += wpe.to(tl.float32)
        tl.store(x_ptr + r[:, None] * C + c[None, :], x, mask=mask)


@triton.jit
def _embedding_bwd_segments_kernel(
    dwte_ptr, part_ptr, dx_ptr, lnf_ptr, ks_ptr, order_ptr, segments_ptr, Ns, R, C,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    length = tl.load(segments_ptr + 4 * s + 2, mask=s < Ns, other=0)
    longest = tl.max(length, 0)
    if longest == 0:
        return
    used = length > 0
    token = tl.load(segments_ptr + 4 * s, mask=used, other=0).to(tl.int64)
    start = tl.load(segments_ptr + 4 * s + 1, mask=used, other=0)
    slot = tl.load(segments_ptr + 4 * s + 3, mask=used, other=0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for first in range(0, longest, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        inside = e[None, :] < length[:, None]
        entry = tl.load(order_ptr + start[:, None] + e[None, :], mask=inside, other=0)
        is_target = entry >= R
        r = tl.where(is_target, entry - R, entry).to(tl.int64)
        factor = tl.load(ks_ptr + r, mask=inside & is_target, other=1.0)
        if is_hip():  # two loads: Triton 3.6 cannot choose between two pointers here
            at = (r * C)[:, :, None] + c[None, None, :]
            from_lnf = is_target[:, :, None]
            mask = inside[:, :, None] & (c < C)[None, None, :]
            lnf = tl.load(lnf_ptr + at, mask=mask & from_lnf, other=0.0)
            dx = tl.load(dx_ptr + at, mask=mask & ~from_lnf, other=0.0)
            rows = tl.where(from_lnf, lnf, dx)
        else:
            row_ptr = tl.where(is_target, lnf_ptr, dx_ptr) + r * C
            mask = inside[:, :, None] & (c < C)[None, None, :]
            rows = tl.load(row_ptr[:, :, None] + c[None, None, :], mask=mask, other=0.0)
        rows = rows.to(tl.float32)
        total += tl.sum(factor[:, :, None] * rows, 1)
    out_ptr = dwte_ptr + token[:, None] * C + c[None, :]
    mask = used[:, None] & (c < C)[None, :]
    is_partial = (slot >= 0)[:, None]
    total += tl.load(out_ptr, mask=mask & ~is_partial, other=0.0)
    tl.store(out_ptr, total, mask=mask & ~is_partial)
    tl.store(part_ptr + slot[:, None] * C + c[None, :], total, mask=mask & is_partial)


@triton.jit
def _embedding_bwd_split_kernel(
    dwte_ptr, part_ptr, split_tokens_ptr, C, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr
):
    row_ptr = split_tokens_ptr + 4 * tl.program_id(0)
    count = tl.load(row_ptr + 2)
    if count == 0:
        return
    token = tl.load(row_ptr).to(tl.int64)
    first_slot = tl.load(row_ptr + 1).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    out_ptr = dwte_ptr + token * C + c
    total = tl.load(out_ptr, mask=c < C, other=0.0)
    for first in range(0, count, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        mask = (e < count)[:, None] & (c < C)[None, :]
        slots = tl.load(part_ptr + (first_slot + e)[:, None] * C + c[None, :], mask=mask, other=0.0)
        total += tl.sum(slots, 0)
    tl.store(out_ptr, total, mask=c < C)


@triton.jit
def _embedding_bwd_wpe_kernel(
    dwpe_ptr, dx_ptr, B, TC, TmaxC, ACC: tl.constexpr, BLOCK: tl.constexpr
):
    """dwpe and dx are flat here: i is an element of [T, C], summed over the B sequences."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for b in tl.range(B, loop_unroll_factor=4):  # four loads in flight
        dx = tl.load(dx_ptr + tl.cast(b, tl.int64) * TC + i, mask=i < TC, other=0.0)
        total += dx.to(tl.float32)
    if ACC:
        total += tl.load(dwpe_ptr + i, mask=i < TmaxC, other=0.0)
    tl.store(dwpe_ptr + i, total, mask=i < TmaxC)


@contract("x[B*T,C] <- ids[B,T] wte[Vp,C] wpe[Tmax,C]?")
def embedding_fwd(x: Tensor, ids: Tensor, wte: Operand, wpe: Tensor | None) -> None:
    """x = wte[ids] (+ wpe)."""
    (R, C), T = x.shape, ids.shape[1]
    row = tuned("embedding_fwd", dtype_name(x), BLOCK_R=R, BLOCK_C=C)
    _embedding_fwd_kernel[(triton.cdiv(R, row["BLOCK_R"]),)](x, ids, full(wte), wpe, R, T, C, **row)


@contract(
    "dwte[Vp,C]+ dwpe[Tmax,C]?+ scratch[*] <- dx[R,C] lnf[R,C] ks[R] tokens.order[2*R]"
    "tokens.segments[Ns,4] tokens.split_tokens[Nh,4]"
)
def embedding_bwd(
    dwte: Tensor,
    dwpe: Tensor | None,
    scratch: Tensor,
    dx: Tensor,
    lnf: Operand,
    ks: Tensor,
    tokens: TokenRows,
    acc: bool,
) -> None:
    """dwte += rows of dx by input token, rows of ks * lnf by target; dwpe (+)=
    sums of dx over the batch.
    """
    order, segments, split_tokens, T = tokens
    R, C = dx.shape
    Ns, Nh = segments.shape[0], split_tokens.shape[0]
    row = tuned("embedding_bwd_segments", dtype_name(dx), BLOCK_C=C)
    grid = (triton.cdiv(Ns, row["BLOCK_S"]), triton.cdiv(C, row["BLOCK_C"]))
    _embedding_bwd_segments_kernel[grid](
        dwte, scratch, dx, full(lnf), ks, order, segments, Ns, R, C, **row
    )
    row = tuned("embedding_bwd_split", dtype_name(dx), BLOCK_C=C)
    _embedding_bwd_split_kernel[(Nh, triton.cdiv(C, row["BLOCK_C"]))](
        dwte, scratch, split_tokens, C, **row
    )
    if dwpe is None:
        return
    row = tuned("embedding_bwd_wpe", dtype_name(dx), BLOCK=dwpe.numel())
    programs = triton.cdiv(dwpe.numel(), row["BLOCK"])
    _embedding_bwd_wpe_kernel[(programs,)](dwpe, dx, R // T, T * C, dwpe.numel(), ACC=acc, **row)


def embedding_bwd_scratch(slots: int, C: int) -> int:
    """Return the fp32 elements: one row of sums per segment of a split token."""
    return slots * C
