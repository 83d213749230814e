"""Output head and cross entropy in one, with the softmax's denominator applied late.  Logits are never stored.

With z[r, j] = lnf[r] . wte[j] the logits, t = target[r] and s the loss scale (step_in's, one over the step's tokens):

    classifier_target  zt[r]   = log2(e) * z[r, t]
    classifier_fwd     p[r, j] = exp(z[r, j] - z[r, t]),  0 at j = t and in the padding j >= V
                       S[r]    = sum_j p[r, j]
    classifier_loss   loss[r] = -log softmax(z[r])[t] = log(1 + S)
                       rs = s / (1 + S),  ks = -s * S / (1 + S),  lns = rs * lnf
    classifier_dx      dlnf    = dz @ wte = rs * (p @ wte) + ks * wte[t],  as dz[r, j] = rs * p[r, j], and ks at j = t
    matmul_dw          dwte    = dz.T @ lnf = p.T @ lns, and in row t ks[r] * lnf[r], which embedding_bwd adds

The usual softmax needs all logits of a row before the first probability: one more pass over [R, Vp] between a product
that has just written it and two that will read it.  Here p leaves the first product's epilogue, and the denominator
enters behind the others.  The exponent field of p takes the place of subtracting the largest logit: losses up to 70
are as exact as fp32 logits allow; p stops at 2^108, a loss of 75.  Leaving j = t out of S avoids cancellation where the
model is sure: a loss of 1e-6 has full precision.

S sums p before it is rounded for storage.  From rounded values losses would be off by 1.7e-3, not 3e-6; the gradients
would improve from 9e-4 to 4e-4 at best (peaked logits), and rounding dlnf to bf16 costs 1.7e-3 by itself.

R = rows of one chunk, C channels, V vocabulary, Vp = V padded.  A target of -1 gives no loss and no gradient.  Hopper
has the first product in hopper_head.py and, where tiles of 320 columns are faster, dX in hopper_wide.py.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import LOG2E, dot, exp_relative
from gpt2_triton.kernels.hopper import classifier as hopper_classifier
from gpt2_triton.kernels.hopper import matmul_wide as hopper_matmul_wide
from gpt2_triton.kernels.reduce import column_sums
from gpt2_triton.kernels.step_io import LOSS_SCALE
from gpt2_triton.kernels.tiles import halves, tile_position
from gpt2_triton.kernels.tuning import dtype_name, is_hopper, num_sms, tuned


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0; below 1/2 it is 2*atanh(t), t = x / (2 + x), as rounding 1 + x would drop a small x."""
    t = x / (2.0 + x)
    u = t * t  # at most 0.04, so the first term left out, u^4 / 9, is under 3e-7
    series = 2.0 * t * (1.0 + u * (1 / 3 + u * (1 / 5 + u * (1 / 7))))
    return tl.where(x < 0.5, series, tl.log(1.0 + x))


@triton.jit
def _classifier_target_kernel(
    zt_ptr, lnf_ptr, wte_ptr, targets_ptr, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    target = tl.load(targets_ptr + r, mask=r < R, other=-1).to(tl.int64)
    products = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, C, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mask = (target >= 0)[:, None] & (c < C)[None, :]
        lnf = tl.load(lnf_ptr + r[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        wte = tl.load(wte_ptr + target[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        products += lnf * wte
    tl.store(zt_ptr + r, tl.sum(products, 1) * LOG2E, mask=r < R)


@triton.jit
def _classifier_fwd_kernel(
    p_desc, part_ptr, lnf_desc, wte_desc, zt_ptr, targets_ptr, R, C, V, Vp,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """p and, of each row of each tile, its sum: part[tile_n, r]."""
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(Vp, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, C, BLOCK_K):
            z = dot(lnf_desc.load([m, k]), wte_desc.load([n, k]).T, z)
        r = m + tl.arange(0, BLOCK_M)
        j = n + tl.arange(0, BLOCK_N)
        zt = tl.load(zt_ptr + r, mask=r < R, other=0.0)
        target = tl.load(targets_ptr + r, mask=r < R, other=-1)
        p = exp_relative(z, zt[:, None], (j < V)[None, :] & (j[None, :] != target[:, None]))
        tl.store(part_ptr + tile_n * R + r, tl.sum(p, 1), mask=r < R)
        if p_desc is not None:
            left, right = halves(p)
            p_desc.store([m, n], left.to(p_desc.dtype))
            p_desc.store([m, n + BLOCK_N // 2], right.to(p_desc.dtype))


@triton.jit
def _classifier_loss_kernel(
    losses_ptr, rs_ptr, ks_ptr, lns_ptr, s_ptr, lnf_ptr, targets_ptr, step_in_ptr, R, C,
    ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = tl.load(targets_ptr + r, mask=r < R, other=-1) >= 0
    s = tl.load(s_ptr + r, mask=r < R, other=0.0)
    loss = tl.where(valid, _log1p(s), 0.0)
    if ACC:
        loss += tl.load(losses_ptr + r, mask=r < R, other=0.0)
    tl.store(losses_ptr + r, loss, mask=r < R)
    if lns_ptr is not None:
        scale = tl.load(step_in_ptr + LOSS_SCALE)
        rs = tl.where(valid, scale / (1.0 + s), 0.0)
        tl.store(rs_ptr + r, rs, mask=r < R)
        tl.store(ks_ptr + r, -rs * s, mask=r < R)
        for first in range(0, C, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            offsets = r[:, None] * C + c[None, :]
            mask = (r < R)[:, None] & (c < C)[None, :]
            lnf = tl.load(lnf_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(lns_ptr + offsets, rs[:, None] * lnf, mask=mask)


@triton.jit
def _store_dx(acc, dln_desc, wte_ptr, rs, ks, target, m, n, C):
    """Finish and store half a tile that begins at row m, column n."""
    c = n + tl.arange(0, acc.shape[1])
    mask = (target >= 0)[:, None] & (c < C)[None, :]
    wte = tl.load(wte_ptr + target[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    dln_desc.store([m, n], tl.fma(ks[:, None], wte, rs[:, None] * acc).to(dln_desc.dtype))


@triton.jit
def _classifier_dx_kernel(
    dln_desc, p_desc, wte_desc, wte_ptr, rs_ptr, ks_ptr, targets_ptr, R, C, Vp,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(C, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, Vp, BLOCK_K):
            acc = dot(p_desc.load([m, k]), wte_desc.load([k, n]), acc)
        r = m + tl.arange(0, BLOCK_M)
        rs = tl.load(rs_ptr + r, mask=r < R, other=0.0)
        ks = tl.load(ks_ptr + r, mask=r < R, other=0.0)
        target = tl.load(targets_ptr + r, mask=r < R, other=-1).to(tl.int64)
        left, right = halves(acc)
        _store_dx(left, dln_desc, wte_ptr, rs, ks, target, m, n, C)
        _store_dx(right, dln_desc, wte_ptr, rs, ks, target, m, n + BLOCK_N // 2, C)


@contract("zt[R] <- lnf[R,C] wte[Vp,C] targets[R]")
def classifier_target(zt: Tensor, lnf: Tensor, wte: Tensor, targets: Tensor) -> None:
    """zt = log2(e) * (lnf . wte[target]), 0 where the target is -1."""
    R, C = lnf.shape
    row = tuned("classifier_rows", dtype_name(lnf), BLOCK_R=R, BLOCK_C=C)
    _classifier_target_kernel[(triton.cdiv(R, row["BLOCK_R"]),)](zt, lnf, wte, targets, R, C, **row)


def _fwd_row(R: int, C: int, Vp: int, dtype: str) -> dict[str, int]:
    return tuned("classifier_fwd", dtype, BLOCK_M=R, BLOCK_N=Vp, BLOCK_K=C)


@contract("p[R,Vp]? rowsum[*] <- lnf[R,C] wte[Vp,C] zt[R] targets[R]")
def classifier_fwd(
    p: Tensor | None, rowsum: Tensor, lnf: Tensor, wte: Tensor, zt: Tensor, targets: Tensor, V: int
) -> None:
    """p = exp(logit - target's logit); rowsum[:R] = its row sums, for classifier_loss, the same when p is None."""
    (R, C), Vp = lnf.shape, wte.shape[0]
    row = _fwd_row(R, C, Vp, dtype_name(lnf))
    block_m, block_n, block_k = row["BLOCK_M"], row["BLOCK_N"], row["BLOCK_K"]
    tiles_n = triton.cdiv(Vp, block_n)
    sums, part = rowsum[:R], rowsum[R : R + tiles_n * R]
    assert part.numel() == tiles_n * R, f"classifier_fwd: rowsum has {rowsum.numel()} elements, needs {R + tiles_n * R}"
    if is_hopper() and dtype_name(lnf) == "bf16":
        hopper_classifier.classifier_fwd(p, part, lnf, wte, zt, targets, V)
    else:
        p_desc = None if p is None else TensorDescriptor.from_tensor(p, [block_m, block_n // 2])
        lnf_desc = TensorDescriptor.from_tensor(lnf, [block_m, block_k])
        wte_desc = TensorDescriptor.from_tensor(wte, [block_n, block_k])
        programs = min(num_sms(), triton.cdiv(R, block_m) * tiles_n)
        _classifier_fwd_kernel[(programs,)](p_desc, part, lnf_desc, wte_desc, zt, targets, R, C, V, Vp, **row)
    column_sums(sums, None, None, part, tiles_n, False)


def classifier_fwd_scratch(R: int, Vp: int, dtype: str) -> int:
    """fp32 elements: the sum of each row, behind it those of each row of each tile."""
    return R * (1 + triton.cdiv(Vp, _fwd_row(R, 1, Vp, dtype)["BLOCK_N"]))


@contract("losses[R]+ rs[R]? ks[R]? lns[R,C]? <- rowsum[*] lnf[R,C] targets[R] step_in[8]")
def classifier_loss(
    losses: Tensor, rs: Tensor | None, ks: Tensor | None, lns: Tensor | None,
    rowsum: Tensor, lnf: Tensor, targets: Tensor, step_in: Tensor, acc: bool,
) -> None:  # fmt: skip
    """losses (+)= log(1 + S); rs, ks: factors of dlogits; lns = rs * lnf.  These are None if only losses count."""
    R, C = lnf.shape
    row = tuned("classifier_rows", dtype_name(lnf), BLOCK_R=R, BLOCK_C=C)
    _classifier_loss_kernel[(triton.cdiv(R, row["BLOCK_R"]),)](
        losses, rs, ks, lns, rowsum, lnf, targets, step_in, R, C, ACC=acc, **row
    )


@contract("dln[R,C] <- p[R,Vp] wte[Vp,C] rs[R] ks[R] targets[R]")
def classifier_dx(dln: Tensor, p: Tensor, wte: Tensor, rs: Tensor, ks: Tensor, targets: Tensor) -> None:
    """dln = rs * (p @ wte) + ks * wte[target]."""
    (R, Vp), C = p.shape, wte.shape[1]
    if is_hopper() and dtype_name(p) == "bf16" and hopper_matmul_wide.is_faster(R, C):
        return hopper_matmul_wide.classifier_dx(dln, p, wte, rs, ks, targets)
    row = tuned("classifier_dx", dtype_name(p), BLOCK_M=R, BLOCK_N=C, BLOCK_K=Vp)
    block_m, block_n, block_k = row["BLOCK_M"], row["BLOCK_N"], row["BLOCK_K"]
    dln_desc = TensorDescriptor.from_tensor(dln, [block_m, block_n // 2])
    p_desc = TensorDescriptor.from_tensor(p, [block_m, block_k])
    wte_desc = TensorDescriptor.from_tensor(wte, [block_k, block_n])
    programs = min(num_sms(), triton.cdiv(R, block_m) * triton.cdiv(C, block_n))
    _classifier_dx_kernel[(programs,)](dln_desc, p_desc, wte_desc, wte, rs, ks, targets, R, C, Vp, **row)
