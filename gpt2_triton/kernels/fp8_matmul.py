"""Products of fp8 operands (fp8.py).  The launchers of matmul.py call them.

Both operands are K-major: [M, K] and [N, K].  Hopper's tensor cores cut sums to 14 bits, so most
kernels of hopper/ add partial sums of 128 terms in fp32 (docs/engineering/fp8.md).  Scales are
powers of two, so dividing by them is exact.  Epilogues are as in matmul.py, with these differences:

matmul_act      writes gelu as an fp8 operand, rows and columns, and gelu' as a byte:
                 round(STEPS * gelu') + ZERO.  GELU's input is not kept.  A byte's error is
                 at most half a step, 0.0025.
matmul_dx_dact  multiplies by those bytes and writes dpre as an fp8 operand, rows and columns.

classifier_target  sums a target's logit in tensor cores, as classifier_fwd sums all
                   logits.  The cut to 14 bits lowers
                 logits by a fraction of 8e-5.  An exact sum for the target alone would change
                 losses by 0.002 where logits are near 30.

With fp8.keep_bf16 none classifier_dx and the head's matmul_dw take p and lns in e5m2.  Its range is
too short for p relative to the target: where a loss is small, all p may be below it, where a loss
is large, one above it.  So another product first sums p over PEEK columns.  The largest power of
two up to 1 + that sum is the row's unit: p, S and the 1 of 1 + S are divided by it, and rs is
multiplied.  2^7 p is stored, so 6e-8 does not become 0, nor does 448 saturate.

The gradient of the target's logit is not rounded, but ks = -rs * sum_j p with the rounded p.  So a
row of dlogits still sums to zero: a sum of one sign in all rows would move all of wte, which no
loss opposes.  For the same reason dlnf also takes the target's row from the rounded wte.  With a
cap of the logits a row need not sum to zero: ks takes what rounding adds to the sum of p times the
cap's derivative.  The scale of lns follows from lnf's: |lns| is at most s |lnf|.

On Hopper hopper.takes chooses the kernel, as in matmul.py.  The order of the bytes of gelu' is
private to the kernels that write and read them.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels import hopper
from gpt2_triton.kernels.blocks import (
    describe,
    describe_halves,
    load_block,
    store_block,
)
from gpt2_triton.kernels.device_math import LOG2E, dgelu, dot, gelu, soft_cap
from gpt2_triton.kernels.e4m3 import STEPS, ZERO, quantise, to_e5m2, token_at
from gpt2_triton.kernels.epilogue import Epilogue, RopeArguments
from gpt2_triton.kernels.fp8 import Fp8, Operand, block, full, in_fp8, transpose
from gpt2_triton.kernels.hopper import classifier_lns as hopper_classifier_lns
from gpt2_triton.kernels.hopper import fp8_gelu as hopper_gelu
from gpt2_triton.kernels.hopper import fp8_matmul as hopper_matmul
from gpt2_triton.kernels.qk_norm import rotated_before
from gpt2_triton.kernels.rope import row_for_heads
from gpt2_triton.kernels.tiles import halves, tile_position, walk
from gpt2_triton.kernels.tuning import programs, tuned
from gpt2_triton.operands import Targets


@triton.jit
def _finish(
    acc, tile_m, m, n, out_desc, b_ptr, res_desc, rows_ptr, scale_ptr, amax_ptr, slope_ptr,
    part_ptr, M, N, rope, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Finish and store half a tile that begins at row m, column n."""
    r = m + tl.arange(0, acc.shape[0])
    c = n + tl.arange(0, acc.shape[1])
    at = r.to(tl.int64)[:, None] * N + c[None, :]
    mask = (r < M)[:, None] & (c < N)[None, :]
    if b_ptr is not None:
        acc += tl.load(b_ptr + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "gelu":
        acc = tl.where(mask, acc, 0.0)  # of no amax; behind gelu registers spill
        slope = dgelu(acc, tl.bfloat16) * STEPS + ZERO
        byte = tl.floor(tl.maximum(slope, 0.0) + 0.5).to(tl.uint8)
        tl.store(slope_ptr + at, byte, mask=mask)
        out = quantise(gelu(acc, tl.bfloat16), scale_ptr, amax_ptr)
        tl.store(rows_ptr + at, out, mask=mask)
    elif EPILOGUE == "dgelu":
        byte = tl.load(slope_ptr + at, mask=mask, other=0).to(tl.float32)
        acc *= (byte - ZERO) / STEPS  # rows past the end of a are 0
        tl.store(part_ptr + tile_m * N + c, tl.sum(acc, 0), mask=c < N)
        tl.store(rows_ptr + at, quantise(tl.where(mask, acc, 0.0), scale_ptr, amax_ptr), mask=mask)
    else:
        if EPILOGUE == "add":
            acc += load_block(res_desc, [m, n]).to(tl.float32)
        elif EPILOGUE == "rope":
            acc = rotated_before(acc, m, n, M, rope)
        else:
            tl.static_assert(EPILOGUE == "")
        store_block(out_desc, [m, n], acc)


@triton.jit
def _fp8_matmul_kernel(
    out_desc, a_desc, w_desc, a_scale_ptr, w_scale_ptr, b_ptr, res_desc,
    rows_ptr, scale_ptr, amax_ptr, slope_ptr, part_ptr, M, N, K, rope, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Write epilogue(a[M, K] @ w[N, K].T / scales)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    unscale = 1.0 / (tl.load(a_scale_ptr) * tl.load(w_scale_ptr))
    BY_TMA: tl.constexpr = isinstance(a_desc, tl.tensor_descriptor)
    first, end, step, offset = walk(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), BY_TMA)
    for tile in tl.range(first, end, step):
        tile_m, tile_n = tile_position(offset + tile, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = dot(load_block(a_desc, [m, k]), load_block(w_desc, [n, k], REPEAT=True).T, acc)
        sums = halves(acc * unscale)
        for half in tl.static_range(2):
            _finish(
                sums[half], tile_m, m, n + half * (BLOCK_N // 2), out_desc, b_ptr, res_desc,
                rows_ptr, scale_ptr, amax_ptr, slope_ptr, part_ptr, M, N, rope, EPILOGUE,
            )  # fmt: skip


@triton.jit
def _fp8_classifier_target_kernel(
    zt_ptr, lnf_ptr, wte_ptr, targets_ptr, lnf_scale_ptr, wte_scale_ptr, R, C, CAP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write zt, the diagonal of lnf @ wte[targets].T, summed as classifier_fwd sums logits."""
    i = tl.arange(0, BLOCK_R)
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + i
    target = tl.load(targets_ptr + r, mask=r < R, other=-1).to(tl.int64)
    z = tl.zeros((BLOCK_R, BLOCK_R), tl.float32)
    for first in range(0, C, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        mask = (target >= 0)[:, None] & (c < C)[None, :]
        lnf = tl.load(lnf_ptr + r[:, None] * C + c[None, :], mask=mask, other=0.0)
        wte = tl.load(wte_ptr + target[:, None] * C + c[None, :], mask=mask, other=0.0)
        z = dot(lnf, wte.T, z)
    factor = 1.0 / (tl.load(lnf_scale_ptr) * tl.load(wte_scale_ptr)) * LOG2E
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], z, 0.0), 1)
    zt = diagonal * factor if CAP == 0 else soft_cap(diagonal, factor, CAP * LOG2E)[0]
    tl.store(zt_ptr + r, zt, mask=r < R)


@triton.jit
def _classifier_lns_kernel(
    columns_ptr, lnf_ptr, rs_ptr, scale_ptr, R, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Write rs * lnf in e5m2, transposed, in pairs of rows."""
    p = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = token_at(p)
    mask = (r < R)[:, None] & (c < C)[None, :]
    lnf = tl.load(lnf_ptr + r.to(tl.int64)[:, None] * C + c[None, :], mask=mask, other=0.0)
    lnf = lnf.to(tl.float32)
    factor = tl.load(rs_ptr + r, mask=r < R, other=0.0) * tl.load(scale_ptr)
    lns = to_e5m2(lnf * factor[:, None])
    out_mask = (c < C)[:, None] & (p < R)[None, :]
    tl.store(columns_ptr + c[:, None] * R + p[None, :], tl.trans(lns), mask=out_mask)


def launch(out: Operand, a: Fp8, w: Fp8, epilogue: Epilogue, w_is_nk: bool) -> int:
    """Launch a product of matmul.py; return the number of rows of tiles."""
    name, b, res, slope, _, part, _ = epilogue
    rope = RopeArguments.of(epilogue.rope)
    a_scale = a.scale
    w_scale = w.scale
    a = a.rows
    w = w.rows if w_is_nk else w.columns
    M, K = a.shape
    N = w.shape[0]
    kernel = hopper.takes(epilogue.op, M, N, "fp8")
    if kernel == "fp8_gelu" and isinstance(out, Fp8) and slope is not None:
        return hopper_gelu.matmul(out, a, a_scale, w, w_scale, b, slope, part)
    if kernel == "fp8_matmul":
        return hopper_matmul.matmul(out, a, a_scale, w, w_scale, b, res, rope)
    row = tuned("matmul", "fp8", BLOCK_M=M, BLOCK_N=N, BLOCK_K=K)
    row = row_for_heads(row, rope.HS.value)
    block_m = row["BLOCK_M"]
    block_n = row["BLOCK_N"]
    block_k = row["BLOCK_K"]
    plain = None if isinstance(out, Fp8) else out
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    _fp8_matmul_kernel[(programs(tiles),)](
        describe_halves(plain, block_m, block_n), describe(a, block_m, block_k),
        describe(w, block_n, block_k), a_scale, w_scale, b, describe_halves(res, block_m, block_n),
        *in_fp8(out), slope, part, M, N, K, rope, EPILOGUE=name, **row,
    )  # fmt: skip
    if isinstance(out, Fp8):
        transpose(out.columns, out.rows, pairs=True)
    return triton.cdiv(M, block_m)


def classifier_target(targets: Targets, lnf: Fp8, wte: Fp8) -> None:
    """Write the targets' logits; 0 where the target is -1."""
    R, C = lnf.shape
    block_r = block(R, 128)
    block_c = block(C, 128)
    _fp8_classifier_target_kernel[(triton.cdiv(R, block_r),)](
        targets.logits,
        lnf.rows,
        wte.rows,
        targets.ids,
        lnf.scale,
        wte.scale,
        R,
        C,
        CAP=targets.cap,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=8,
    )


def classifier_lns(lns: Fp8, lnf: Tensor, rs: Tensor) -> None:
    """Write the columns of lns = rs * lnf, whose scale is known."""
    R, C = lnf.shape
    if hopper.takes("classifier_lns", R, C, "fp8"):
        return hopper_classifier_lns.classifier_lns(lns.columns, lnf, rs, lns.scale)
    block_r = block(R, 128)
    block_c = block(C, 64)
    _classifier_lns_kernel[(triton.cdiv(R, block_r), triton.cdiv(C, block_c))](
        lns.columns, lnf, rs, lns.scale, R, C, BLOCK_R=block_r, BLOCK_C=block_c, num_warps=8
    )


def dw_operands(
    dout: Operand, inp: Operand
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
    """Return dW's operands and their scales; in fp8 columns [N, R] and [K, R],
    written now if they were not.
    """
    if not (isinstance(dout, Fp8) and isinstance(inp, Fp8)):
        return (full(dout), full(inp)), (None, None)
    for operand in (dout, inp):
        if not operand.transposed:
            transpose(operand.columns, operand.rows, pairs=True)
    return (dout.columns, inp.columns), (dout.scale, inp.scale)
