"""Output head and cross entropy together, with the softmax's denominator applied
late.  Logits are never stored.

With z[r, j] = lnf[r] . wte[j] the logits, t = target[r] and s the loss scale (step_in's,
one over the step's tokens):

    classifier_target  zt[r]   = log2(e) * z[r, t]
    classifier_fwd     p[r, j] = exp(z[r, j] - z[r, t]),  0 at j = t and in the padding j >= V
                       S[r]    = sum_j p[r, j]
    classifier_loss    loss[r] = -log softmax(z[r])[t] = log(1 + S)
                       rs = s / (1 + S),  ks = -s * S / (1 + S),  lns = rs * lnf
    classifier_dx      dlnf    = dz @ wte = rs * (p @ wte) + ks * wte[t],
                                 as dz[r, j] = rs * p[r, j], and ks at j = t
    matmul_dw          dwte    = dz.T @ lnf = p.T @ lns, and in row t ks[r] * lnf[r],
                                 which embedding_bwd adds

The usual softmax needs all logits of a row before the first probability: one more pass over
[R, Vp].  Here the first product stores p, and the epilogues of the two products that read p
apply the denominator.  p is relative to the target's logit, not to the largest logit: p's
exponent is wide enough.  Losses up to 70 are as exact as fp32 logits allow.  p is cut at
2^108, a loss of 75.  S leaves out j = t, so nothing cancels where the target's probability is
near 1: a loss of 1e-6 has full precision.

With a soft cap (model.logit_cap) the logits are cap * tanh(z / cap), and zt, p, S and the loss are
of these.  For dz, p is stored times the cap's derivative at j, 1 - tanh(z[r, j] / cap)^2, and ks
has the target's derivative as a factor.

S sums p before p is rounded for storage.  Sums of rounded values would raise the error of
losses from 3e-6 to 1.7e-3.  They would at best halve the gradients' error of 9e-4; rounding
dlnf to bf16 adds 1.7e-3 anyway.

R = rows of one chunk, C channels, V vocabulary, Vp = V padded.  A target of -1 gives no loss and no
gradient.  On Hopper, hopper.takes decides which of the products run in the kernels of hopper/.
fp8_matmul.py says what fp8 changes.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels import fp8_matmul, hopper
from gpt2_triton.kernels.blocks import describe, describe_halves, store_block
from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import (
    LOG2E,
    exp_relative_tile,
    scale_and_add_target,
    soft_cap,
)
from gpt2_triton.kernels.e4m3 import P_SHIFT, nearest_e5m2, peek_exponent, to_e5m2
from gpt2_triton.kernels.fp8 import Fp8, Operand, full, stored, transpose
from gpt2_triton.kernels.hopper import classifier as hopper_classifier
from gpt2_triton.kernels.hopper import classifier_dx as hopper_dx
from gpt2_triton.kernels.hopper import matmul_wide
from gpt2_triton.kernels.hopper.pipeline import Forms
from gpt2_triton.kernels.matmul import tile_product
from gpt2_triton.kernels.reduce import column_sums
from gpt2_triton.kernels.step_io import LOSS_SCALE
from gpt2_triton.kernels.tiles import halves, joined, tile_position, walk
from gpt2_triton.kernels.tuning import dtype_name, programs, tuned
from gpt2_triton.operands import Targets

# columns that fp8 sums first (fp8_matmul.py); GPT-2's first tokens are the most frequent
PEEK = 1280
NARROWEST = 128  # the least BLOCK_N of classifier_fwd in any GPU's table


@triton.jit
def _log1p(x):
    """Return log(1 + x), x >= 0; below 1/2 2*atanh(x / (2 + x)): 1 + x would round x away."""
    t = x / (2.0 + x)
    u = t * t  # at most 0.04, so the first term left out, u^4 / 9, is under 3e-7
    series = 2.0 * t * (1.0 + u * (1 / 3 + u * (1 / 5 + u * (1 / 7))))
    return tl.where(x < 0.5, series, tl.log(1.0 + x))


@triton.jit
def _classifier_target_kernel(
    zt_ptr, lnf_ptr, wte_ptr, targets_ptr, R, C, CAP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    target = tl.load(targets_ptr + r, mask=r < R, other=-1).to(tl.int64)
    products = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, C, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mask = (target >= 0)[:, None] & (c < C)[None, :]
        lnf = tl.load(lnf_ptr + r[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        wte = tl.load(wte_ptr + target[:, None] * C + c[None, :], mask=mask, other=0.0)
        products += lnf * wte.to(tl.float32)
    z = tl.sum(products, 1)
    zt = z * LOG2E if CAP == 0 else soft_cap(z, LOG2E, CAP * LOG2E)[0]
    tl.store(zt_ptr + r, zt, mask=r < R)


@triton.jit
def _capped_half(z, head, n, V, CAP: tl.constexpr, FP8: tl.constexpr):
    """Return p of half a tile from column n on, times the cap's derivative, the sums of p's rows,
    and in fp8 those of what rounding adds.  head = (factor, reference, target).
    """
    j = n + tl.arange(0, z.shape[1])
    logits, slope = soft_cap(z, head[0], CAP)
    p = exp_relative_tile(logits, head[1], head[2], j)
    p = tl.where((j < V)[None, :], p, 0.0)
    sums = tl.sum(p, 1)
    p *= slope
    added = sums
    if FP8:
        rounded = nearest_e5m2(p)
        added = tl.sum(rounded - p, 1)
        p = rounded
    return p, sums, added


@triton.jit
def _capped_exponentials(z, head, n, V, CAP: tl.constexpr, FP8: tl.constexpr):
    """Return what _capped_half does, of a tile: registers would not hold all of p and of the cap's
    derivative.
    """
    left, right = halves(z)
    left, left_sums, left_added = _capped_half(left, head, n, V, CAP, FP8)
    middle = n + z.shape[1] // 2
    right, right_sums, right_added = _capped_half(right, head, middle, V, CAP, FP8)
    return joined(left, right), left_sums + right_sums, left_added + right_added


@triton.jit
def _classifier_fwd_kernel(
    p_desc, p_scale_ptr, part_ptr, lnf_desc, wte_desc, zt_ptr, peek_ptr, targets_ptr, lnf_scale_ptr,
    wte_scale_ptr, R, C, V, Vp, CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Write p, times the cap's derivative, and p's rows' sums in each tile to part[tile_n, r]; in
    fp8 also rounded p's, or with a cap what rounding adds to them.
    """
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(Vp, BLOCK_N)
    SHIFT: tl.constexpr = 0 if p_scale_ptr is None else P_SHIFT
    factor = LOG2E
    if lnf_scale_ptr is not None:
        factor = 1.0 / (tl.load(lnf_scale_ptr) * tl.load(wte_scale_ptr)) * LOG2E
    if p_scale_ptr is not None:
        tl.store(p_scale_ptr, 2.0**-SHIFT)
    BY_TMA: tl.constexpr = isinstance(lnf_desc, tl.tensor_descriptor)
    first, end, step, offset = walk(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), BY_TMA)
    for tile in tl.range(first, end, step, flatten=BY_TMA):
        tile_m, tile_n = tile_position(offset + tile, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        z = tile_product(lnf_desc, wte_desc, m, n, C, True, BLOCK_M, BLOCK_N, BLOCK_K)
        r = m + tl.arange(0, BLOCK_M)
        j = n + tl.arange(0, BLOCK_N)
        reference = tl.load(zt_ptr + r, mask=r < R, other=0.0)
        if p_scale_ptr is not None:
            peek = tl.load(peek_ptr + r, mask=r < R, other=0.0)
            reference += peek_exponent(peek) + SHIFT
        target = tl.load(targets_ptr + r, mask=r < R, other=-1)
        if CAP == 0:
            p = exp_relative_tile(z * factor, reference, target, j)
            p = tl.where((j < V)[None, :], p, 0.0)
            sums = tl.sum(p, 1)
        else:
            head = (factor, reference, target)
            FP8: tl.constexpr = p_scale_ptr is not None
            p, sums, stored_sums = _capped_exponentials(z, head, n, V, CAP * LOG2E, FP8)
        tl.store(part_ptr + tile_n * R + r, sums * 2.0**SHIFT, mask=r < R)
        if p_scale_ptr is not None:
            if CAP == 0:
                p = nearest_e5m2(p)
                stored_sums = tl.sum(p, 1)
            row = part_ptr + (tiles_n + tile_n) * R
            tl.store(row + r, stored_sums * 2.0**SHIFT, mask=r < R)
        if p_desc is not None:
            left, right = halves(p)
            if p_scale_ptr is not None:
                left = to_e5m2(left)
                right = to_e5m2(right)
            store_block(p_desc, [m, n], left)
            store_block(p_desc, [m, n + BLOCK_N // 2], right)


@triton.jit
def _classifier_loss_kernel(
    losses_ptr, rs_ptr, ks_ptr, lns_ptr, lns_scale_ptr, s_ptr, zt_ptr, lnf_ptr, lnf_scale_ptr,
    targets_ptr, step_in_ptr, R, C, ACC: tl.constexpr, CAP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = tl.load(targets_ptr + r, mask=r < R, other=-1) >= 0
    s = tl.load(s_ptr + r, mask=r < R, other=0.0)
    unit = 1.0
    if lns_scale_ptr is not None:
        peek = tl.load(s_ptr + 2 * R + r, mask=r < R, other=0.0)
        unit = tl.exp2(peek_exponent(peek))
    loss = tl.where(valid, _log1p(s * unit), 0.0)
    if ACC:
        loss += tl.load(losses_ptr + r, mask=r < R, other=0.0)
    tl.store(losses_ptr + r, loss, mask=r < R)
    if rs_ptr is not None:
        scale = tl.load(step_in_ptr + LOSS_SCALE)
        rs = tl.where(valid, scale / (1.0 / unit + s), 0.0)
        tl.store(rs_ptr + r, rs, mask=r < R)
        target_s = s
        if CAP != 0:
            tanh = tl.load(zt_ptr + r, mask=r < R, other=0.0) / (CAP * LOG2E)
            target_s *= 1.0 - tanh * tanh
        if lns_scale_ptr is not None:
            of_stored = tl.load(s_ptr + R + r, mask=r < R, other=0.0)
            target_s = of_stored if CAP == 0 else target_s + of_stored
        tl.store(ks_ptr + r, -rs * target_s, mask=r < R)
        # 57344 is 128 * 448, so e5m2 leaves lns the margin that e4m3 leaves lnf
        if lns_scale_ptr is not None:
            tl.store(lns_scale_ptr, 128.0 * tl.load(lnf_scale_ptr) / scale)
    if lns_ptr is not None:
        for first in range(0, C, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            at = r[:, None] * C + c[None, :]
            mask = (r < R)[:, None] & (c < C)[None, :]
            lnf = tl.load(lnf_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(lns_ptr + at, rs[:, None] * lnf, mask=mask)


@triton.jit
def _classifier_dx_kernel(
    dln_desc, p_desc, wte_desc, p_scale_ptr, wte_scale_ptr, wte_ptr, rs_ptr, ks_ptr, targets_ptr, R,
    C, Vp, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(C, BLOCK_N)
    W_IS_NK: tl.constexpr = p_scale_ptr is not None  # in fp8 wte is stored transposed
    BY_TMA: tl.constexpr = isinstance(dln_desc, tl.tensor_descriptor)
    first, end, step, offset = walk(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), BY_TMA)
    for tile in tl.range(first, end, step, flatten=BY_TMA):
        tile_m, tile_n = tile_position(offset + tile, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        acc = tile_product(p_desc, wte_desc, m, n, Vp, W_IS_NK, BLOCK_M, BLOCK_N, BLOCK_K)
        r = m + tl.arange(0, BLOCK_M)
        rs = tl.load(rs_ptr + r, mask=r < R, other=0.0)
        ks = tl.load(ks_ptr + r, mask=r < R, other=0.0)
        if p_scale_ptr is not None:
            rs /= tl.load(p_scale_ptr) * tl.load(wte_scale_ptr)
            ks /= tl.load(wte_scale_ptr)
        target = tl.load(targets_ptr + r, mask=r < R, other=-1).to(tl.int64)
        sums = halves(acc)
        for half in tl.static_range(2):
            column = n + half * (BLOCK_N // 2)
            c = column + tl.arange(0, BLOCK_N // 2)
            dln = scale_and_add_target(sums[half], rs, ks, target, wte_ptr, c, C)
            store_block(dln_desc, [m, column], dln)


@contract("targets.logits[R] <- targets.ids[R] lnf[R,C] wte[Vp,C]")
def classifier_target(targets: Targets, lnf: Operand, wte: Operand) -> None:
    """Write the targets' logits, zt; 0 where the target is -1."""
    R, C = lnf.shape
    if isinstance(lnf, Fp8) and isinstance(wte, Fp8):
        return fp8_matmul.classifier_target(targets, lnf, wte)
    row = tuned("classifier_rows", dtype_name(lnf), BLOCK_R=R, BLOCK_C=C)
    _classifier_target_kernel[(triton.cdiv(R, row["BLOCK_R"]),)](
        targets.logits, lnf, wte, targets.ids, R, C, CAP=targets.cap, **row
    )


def _fwd_row(R: int, C: int, Vp: int, dtype: str) -> dict[str, int]:
    row = tuned("classifier_fwd", dtype, BLOCK_M=R, BLOCK_N=Vp, BLOCK_K=C)
    return row | hopper.blocks("classifier_fwd", R, Vp, dtype)


@contract("p[R,Vp]? rowsum[*] <- lnf[R,C] wte[Vp,C] targets.ids[R] targets.logits[R]")
def classifier_fwd(
    p: Operand | None,
    rowsum: Tensor,
    lnf: Operand,
    wte: Operand,
    targets: Targets,
    V: int,
) -> None:
    """Write p = exp(logit - target's logit), unless it is None, and rowsum[:R], the row sums of p.
    If p is an Fp8, its rows, columns and scale are written, in units of
    2^peek_exponent(rowsum[2R:3R]), and rowsum[R:2R]: the row sums of p as it is stored.  With a
    cap, p is stored times the cap's derivative, and these are the sums of what rounding adds.
    """
    R = len(targets.ids)
    peek = None
    stored_sums = None
    part = rowsum[R:]
    if isinstance(p, Fp8):
        stored_sums = rowsum[R : 2 * R]
        peek = rowsum[2 * R : 3 * R]
        part = rowsum[3 * R :]
        _exponentials(None, peek, None, part, lnf, wte[:PEEK], None, targets, V)
    _exponentials(p, rowsum[:R], stored_sums, part, lnf, wte, peek, targets, V)


def _exponentials(
    p: Operand | None, sums: Tensor, stored_sums: Tensor | None, part: Tensor, lnf: Operand,
    wte: Operand, peek: Tensor | None, targets: Targets, V: int,
) -> None:  # fmt: skip
    """Write p, unless it is None, the sums of its rows, and those of p as it is stored."""
    (R, C), Vp = lnf.shape, wte.shape[0]
    x, x_scale, _ = stored(lnf)
    w, w_scale, _ = stored(wte)
    plain, p_scale, _ = stored(p)
    row = _fwd_row(R, C, Vp, dtype_name(x))
    block_m = row["BLOCK_M"]
    block_n = row["BLOCK_N"]
    block_k = row["BLOCK_K"]
    tiles_n = triton.cdiv(Vp, block_n)
    needed = (1 if p_scale is None else 2) * tiles_n * R
    assert part.numel() >= needed, (
        f"classifier_fwd: part has {part.numel()} elements, needs {needed}"
    )
    if hopper.takes("classifier_fwd", R, Vp, dtype_name(x)):
        hopper_classifier.classifier_fwd(
            Forms.of(p), part, Forms.of(lnf), Forms.of(wte), peek, targets, V
        )
    else:
        _classifier_fwd_kernel[(programs(triton.cdiv(R, block_m) * tiles_n),)](
            describe_halves(plain, block_m, block_n), p_scale, part,
            describe(x, block_m, block_k), describe(w, block_n, block_k),
            targets.logits, peek, targets.ids, x_scale, w_scale, R, C, V, Vp, CAP=targets.cap,
            **row,
        )  # fmt: skip
        if isinstance(p, Fp8):
            transpose(p.columns, p.rows, pairs=True)
    column_sums(sums, stored_sums, None, part, tiles_n, False)


def classifier_fwd_scratch(R: int, Vp: int, dtype: str) -> int:
    """Return the fp32 elements of rowsum: sums of rows and of their tiles; in
    fp8 twice, and the peek's.
    """
    sums, parts = (3, 2) if dtype == "fp8" else (1, 1)
    # the GPU may be another than the plan's
    tile = min(NARROWEST, _fwd_row(R, 1, Vp, dtype)["BLOCK_N"])
    return R * (sums + parts * triton.cdiv(Vp, tile))


@contract(
    "losses[R]+ rs[R]? ks[R]? lns[R,C]? <- rowsum[*] lnf[R,C] targets.ids[R] targets.logits[R]"
    " step_in[8]"
)
def classifier_loss(
    losses: Tensor, rs: Tensor | None, ks: Tensor | None, lns: Operand | None,
    rowsum: Tensor, lnf: Operand, targets: Targets, step_in: Tensor, acc: bool,
) -> None:  # fmt: skip
    """Write losses (+)= log(1 + S), the factors rs and ks of dlogits, and lns = rs *
    lnf.  Without a backward pass, rs, ks and lns are None.  An fp8 lns has columns only,
    and its scale is written too.
    """
    R, C = lnf.shape
    x = full(lnf)
    lnf_scale = stored(lnf)[1]
    plain, scale = (None, lns.scale) if isinstance(lns, Fp8) else (lns, None)
    row = tuned("classifier_rows", dtype_name(x), BLOCK_R=R, BLOCK_C=C)
    _classifier_loss_kernel[(triton.cdiv(R, row["BLOCK_R"]),)](
        losses, rs, ks, plain, scale, rowsum, targets.logits, x, lnf_scale, targets.ids, step_in, R,
        C, ACC=acc, CAP=targets.cap, **row,
    )  # fmt: skip
    if isinstance(lns, Fp8):
        fp8_matmul.classifier_lns(lns, x, rs)


@contract("dln[R,C] <- p[R,Vp] wte[Vp,C] rs[R] ks[R] targets[R]")
def classifier_dx(
    dln: Tensor, p: Operand, wte: Operand, rs: Tensor, ks: Tensor, targets: Tensor
) -> None:
    """Write dln = rs * (p @ wte) + ks * wte[target]."""
    (R, Vp), C = p.shape, wte.shape[1]
    p, p_scale, _ = stored(p)
    target_rows, wte_scale, _ = stored(wte)
    w = wte.columns if isinstance(wte, Fp8) else wte
    kernel = hopper.takes("classifier_dx", R, C, dtype_name(p))
    if kernel == "matmul_wide":
        return matmul_wide.classifier_dx(dln, p, w, rs, ks, targets)
    if kernel == "classifier_dx":
        return hopper_dx.classifier_dx(dln, p, p_scale, w, wte_scale, target_rows, rs, ks, targets)
    row = tuned("classifier_dx", dtype_name(p), BLOCK_M=R, BLOCK_N=C, BLOCK_K=Vp)
    block_m = row["BLOCK_M"]
    block_n = row["BLOCK_N"]
    block_k = row["BLOCK_K"]
    tiles = triton.cdiv(R, block_m) * triton.cdiv(C, block_n)
    _classifier_dx_kernel[(programs(tiles),)](
        describe_halves(dln, block_m, block_n), describe(p, block_m, block_k),
        describe(w, *((block_k, block_n) if p_scale is None else (block_n, block_k))),
        p_scale, wte_scale, target_rows, rs, ks, targets, R, C, Vp, **row,
    )  # fmt: skip
