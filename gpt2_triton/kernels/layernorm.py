"""LayerNorm (Ba et al. 2016, https://arxiv.org/abs/1607.06450) and RMSNorm (Zhang & Sennrich 2019,
https://arxiv.org/abs/1910.07467) over C channels, forward and backward, for R rows.

forward    mean = sum_C(x) / C,  rstd = 1 / sqrt(sum_C((x - mean)^2) / C + eps)
           xhat = (x - mean) * rstd,  out = xhat * w + b
backward   g = dout * w,  dx = (more +) rstd * (g - sum_C(g) / C - xhat * sum_C(g * xhat) / C)
           dw (+)= sum_R(dout * xhat),  db (+)= sum_R(dout),
           dbias (+)= sum_R(dx as it is after the update)

RMSNorm is the same with mean 0, no b and no db, and without the term sum_C(g): a Norm whose mean is
None.

The residual is not fused here: the product before the norm adds it in its epilogue (matmul_add), so
x is the sum already.  dbias is the gradient of that product's bias.  The product's output enters
the residual stream unchanged, so dbias is the column sums of the new dx.  With dropout (dropout.py)
the output's gradient is dbranch, the masked dx, and dbias sums dbranch.  An fp8 dx then has dbranch
in fp8, for products, and dx in bf16.  Statistics are two-pass, in fp32, of the stored x.  Column
sums run per program over a fixed set of rows, then over programs in a fixed order (reduce.py).  The
kernels are bound by bandwidth: forward reads and writes a row, backward reads three and writes one.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.dropout import dropped, masked_rows
from gpt2_triton.kernels.e4m3 import quantise, record_bits, row_maxima
from gpt2_triton.kernels.fp8 import Fp8, Operand, full, in_fp8, stored
from gpt2_triton.kernels.reduce import column_sums
from gpt2_triton.kernels.tuning import PLANNED_SMS, dtype_name, next_power_of_2, num_sms, tuned
from gpt2_triton.operands import Branch, Norm


@triton.jit
def _read(ptr, at, mask):
    """Return elements in fp32, 0 where masked; None where there is no tensor."""
    found = None
    if ptr is not None:
        found = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def _standardised(x, mean, rstd):
    """Return xhat; mean is None for RMSNorm."""
    if mean is not None:
        x = x - mean[:, None]
    return x * rstd[:, None]


@triton.jit
def _normalise(x, mean, rstd, w, b):
    """Return the norm's output; forward and recomputation share it, and so have equal bits."""
    out = _standardised(x, mean, rstd) * w[None, :]
    if b is not None:
        out = out + b[None, :]
    return out


@triton.jit
def _gradient(g, xhat, mean, rstd, C):
    """Return the gradient of x, from that of xhat."""
    if mean is not None:
        mean_g = tl.sum(g, 1) / C
    mean_gx = tl.sum(g * xhat, 1) / C
    if mean is not None:
        g -= mean_g[:, None]
    return (g - xhat * mean_gx[:, None]) * rstd[:, None]


@triton.jit
def _elements(r, c, C):
    """Return the indices of rows r, columns c."""
    # a thread holds runs of at most 8 elements, 16 bytes of bf16.  Without the limit a store of
    # e4m3 would lengthen all runs of the kernel to 16, and so change the order of the kernel's sums
    return tl.max_contiguous(r[:, None] * C + c[None, :], [1, 8])


@triton.jit(do_not_specialize_on_alignment=["scale_ptr", "amax_ptr"])
def _layernorm_fwd_kernel(
    out_ptr, out8_ptr, mean_ptr, rstd_ptr, x_ptr, w_ptr, b_ptr, scale_ptr, amax_ptr, R, C, eps,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK_C)
    w = _read(w_ptr, c, c < C)
    b = _read(b_ptr, c, c < C)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = _elements(r, c, C)
    mask = (r < R)[:, None] & (c < C)[None, :]
    x = _read(x_ptr, at, mask)
    mean = None
    centred = x
    if mean_ptr is not None:
        mean = tl.sum(x, 1) / C
        centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    out = _normalise(x, mean, rstd, w, b)
    if mean_ptr is not None:
        tl.store(mean_ptr + r, mean, mask=r < R)
    if out_ptr is not None:
        tl.store(out_ptr + at, out, mask=mask)
    if out8_ptr is not None:
        tl.store(out8_ptr + at, quantise(out, scale_ptr, amax_ptr, r < R), mask=mask)  # 0 past C
    tl.store(rstd_ptr + r, rstd, mask=r < R)


@triton.jit(do_not_specialize=["i"])
def _layernorm_bwd_kernel(
    dx_ptr, dbranch_ptr, ln_ptr, part_ptr, dout_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr,
    more_ptr, dx8_ptr, dx_scale_ptr, dx_amax_ptr, ln_scale_ptr, step_key_ptr, i, R, C,
    DROPPED: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    c = tl.arange(0, BLOCK_C)
    w = _read(w_ptr, c, c < C)
    b = _read(b_ptr, c, c < C)
    dw = tl.zeros((ROWS, BLOCK_C), tl.float32)
    db = tl.zeros((ROWS, BLOCK_C), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK_C), tl.float32)
    amax_bits = tl.zeros((ROWS,), tl.int32)
    for first in tl.range(program * ROWS, R, programs * ROWS, num_stages=STAGES):
        r = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        at = _elements(r, c, C)
        mask = (r < R)[:, None] & (c < C)[None, :]
        dout = _read(dout_ptr, at, mask)
        x = _read(x_ptr, at, mask)
        rstd = _read(rstd_ptr, r, r < R)
        mean = _read(mean_ptr, r, r < R)
        if ln_ptr is not None:
            ln = _normalise(x, mean, rstd, w, b)
            if ln_scale_ptr is not None:
                ln = quantise(ln, ln_scale_ptr, None)  # the forward pass has recorded its amax
            tl.store(ln_ptr + at, ln, mask=mask)
        # dout is 0 past the end of a row, and rstd past the last row, so
        # the sums get nothing from there
        g = dout * w[None, :]
        xhat = _standardised(x, mean, rstd)
        dx = _gradient(g, xhat, mean, rstd, C)
        if more_ptr is not None:
            dx += _read(more_ptr, at, mask)
        tl.store(dx_ptr + at, dx, mask=mask)
        if DROPPED:
            dx = masked_rows(dx, r, C, step_key_ptr, i, DROPPED)
        if dbranch_ptr is not None:
            tl.store(dbranch_ptr + at, dx, mask=mask)
        if dx8_ptr is not None:
            dx8 = quantise(dx, dx_scale_ptr, None)
            # behind the cast, else registers spill
            amax_bits = row_maxima(amax_bits, tl.where(mask, dx, 0.0))
            tl.store(dx8_ptr + at, dx8, mask=mask)
        dw += dout * xhat
        if b_ptr is not None:
            db += dout
            dbias += dx
    if dx_amax_ptr is not None:
        record_bits(dx_amax_ptr, amax_bits)
    own = program * C + c
    tl.store(part_ptr + own, tl.sum(dw, 0), mask=c < C)
    if b_ptr is not None:
        tl.store(part_ptr + programs * C + own, tl.sum(db, 0), mask=c < C)
        tl.store(part_ptr + 2 * programs * C + own, tl.sum(dbias, 0), mask=c < C)


@contract("out[R,C] norm.mean[R]? norm.rstd[R] <- x[R,C] norm.w[C] norm.b[C]?")
def layernorm_fwd(out: Operand, norm: Norm, x: Tensor) -> None:
    """Write out = the norm of x, and the norm's mean and rstd.  An Fp8 out gets rows, and its
    value unless that is None.
    """
    R, C = x.shape
    plain = out.value if isinstance(out, Fp8) else out
    out8, *scaling = in_fp8(out)
    row = tuned("layernorm_fwd", dtype_name(x), ROWS=R)
    _layernorm_fwd_kernel[(triton.cdiv(R, row["ROWS"]),)](
        plain, out8, norm.mean, norm.rstd, x, norm.w, norm.b, *scaling, R, C, norm.eps,
        BLOCK_C=next_power_of_2(C), **row,
    )  # fmt: skip


@contract(
    "dx[R,C]+ norm.dw[C]+ norm.db[C]?+ branch.db[C]?+ branch.dout[R,C]? ln[R,C]? scratch[*] <-"
    "dout[R,C] x[R,C] norm.w[C] norm.b[C]? norm.mean[R]? norm.rstd[R] more[R,C]?"
    "branch.dropout.step_key[4]?"
)
def layernorm_bwd(
    dx: Operand,
    norm: Norm,
    branch: Branch,
    ln: Operand | None,
    scratch: Tensor,
    dout: Tensor,
    x: Tensor,
    more: Operand | None,
    acc: bool,
) -> None:
    """dx = (more +) gradient through the norm; the norm's dw and db and the branch's db (+)=
    column sums; the branch's dout: dx, masked; ln: the norm's output again.
    """
    R, C = x.shape
    ln, ln_scale, _ = stored(ln)
    step_key, i, p = branch.dropout or (None, None, 0.0)
    row = _bwd_row(R, C, dtype_name(x))
    programs = min(row.pop("PER_SM") * num_sms(), scratch.numel() // (3 * C))
    _layernorm_bwd_kernel[(programs,)](
        full(dx), branch.dout, ln, scratch, dout, x, norm.w, norm.b, norm.mean, norm.rstd,
        None if more is None else full(more), *in_fp8(dx), ln_scale, step_key, i, R, C,
        DROPPED=dropped(p), BLOCK_C=next_power_of_2(C), **row,
    )  # fmt: skip
    column_sums(norm.dw, norm.db, branch.db, scratch, programs, acc)


def _bwd_row(R: int, C: int, dtype: str) -> dict[str, int]:
    return tuned("layernorm_bwd" if C <= 1024 else "layernorm_bwd_wide", dtype, ROWS=R)


def layernorm_bwd_scratch(R: int, C: int, dtype: str) -> int:
    """Return the fp32 elements: dw, db and dbias of each program."""
    return 3 * C * _bwd_row(R, C, dtype)["PER_SM"] * PLANNED_SMS
