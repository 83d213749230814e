"""AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101) over a flat range, gradients clipped on the way
in.

    g  = grad * clip factor
    m += alpha1 * (g - m),    v += alpha2 * (g^2 - v),    alpha = 1 - beta, subtracted in float64 by the host
    w -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * w)

lr, the bias corrections, the clip factor, the step and the seed are read from device memory (step_io.py), so that a
captured launch serves all steps.  If step_out[APPLY] is 0, nothing changes.  The new w is stored in one of three ways:
fp32            as it is
bf16            rounded stochastically: 16 random bits are added below the ones that stay, so that the rounding error
                is 0 on average and updates smaller than half an ulp are not lost; the bits are Philox's for (seed,
                step, element)
bf16 with low   exactly, as bf16 and the 16 lower bits (device_math.split_master)
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import adamw_moments, adamw_update, join_master, split_master
from gpt2_triton.kernels.philox import ROUND, philox_words
from gpt2_triton.kernels.step_io import APPLY, CLIP_FACTOR, LR, M_CORRECTION, SEED_HIGH, SEED_LOW, STEP, V_CORRECTION
from gpt2_triton.kernels.tuning import dtype_name, tuned


@triton.jit(do_not_specialize=["first"])  # an index, not an address: divisibility gains nothing
def _adamw_kernel(
    w_ptr, m_ptr, v_ptr, low_ptr, g_ptr, step_out_ptr, step_in_ptr, step_key_ptr, n, first, decay, lr_factor,
    alpha1, alpha2, eps, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(step_out_ptr + APPLY) == 0.0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK
    i = at + tl.arange(0, BLOCK)
    mask = i < n
    lr = tl.load(step_in_ptr + LR) * lr_factor
    stored = tl.load(w_ptr + i, mask=mask, other=0.0)
    if low_ptr is None:
        w = stored.to(tl.float32)
    else:
        w = join_master(stored, tl.load(low_ptr + i, mask=mask, other=0))
    g = tl.load(g_ptr + i, mask=mask, other=0.0) * tl.load(step_out_ptr + CLIP_FACTOR)
    m = tl.load(m_ptr + i, mask=mask, other=0.0)
    v = tl.load(v_ptr + i, mask=mask, other=0.0)
    m, v = adamw_moments(m, v, g, alpha1, alpha2)
    tl.store(m_ptr + i, m, mask=mask)
    tl.store(v_ptr + i, v, mask=mask)
    m_correction = tl.load(step_in_ptr + M_CORRECTION)
    v_correction = tl.load(step_in_ptr + V_CORRECTION)
    w -= adamw_update(w, m, v, lr, m_correction, v_correction, decay, eps)
    if STOCHASTIC:
        seed = tl.load(step_key_ptr + SEED_LOW).to(tl.int64) | (tl.load(step_key_ptr + SEED_HIGH).to(tl.int64) << 32)
        noise = philox_words(seed, first + at, tl.load(step_key_ptr + STEP), ROUND, BLOCK) & 0xFFFF
        bits = w.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, (bits + noise) & 0xFFFF0000, bits)
        tl.store(w_ptr + i, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)
    elif low_ptr is not None:
        hi, low = split_master(w)
        tl.store(w_ptr + i, hi, mask=mask)
        tl.store(low_ptr + i, low, mask=mask)
    else:
        tl.store(w_ptr + i, w, mask=mask)


@contract("w[n] m[n] v[n] low[n]?+ <- g[n] step_out[4] step_in[8] step_key[4]")
def adamw(
    w: Tensor, m: Tensor, v: Tensor, low: Tensor | None, g: Tensor, step_out: Tensor, step_in: Tensor,
    step_key: Tensor, first: int, decay: float, lr_factor: float, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Update w, m, v (and low) in place with lr_factor times the learning rate; `first`, a multiple of 4, is the flat
    index of w[0] in the whole model.
    """
    n = w.numel()
    dtype = dtype_name(w)
    row = tuned("adamw", dtype, BLOCK=n)
    _adamw_kernel[(triton.cdiv(n, row["BLOCK"]),)](
        w, m, v, low, g, step_out, step_in, step_key, n, first, decay, lr_factor, 1.0 - beta1, 1.0 - beta2, eps,
        STOCHASTIC=dtype == "bf16" and low is None, **row,
    )  # fmt: skip
