"""AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101)
over a flat range of parameters.

    g  = grad * clip factor
    m += alpha1 * (g - m),    v += alpha2 * (g^2 - v),
    alpha = 1 - beta, subtracted in float64 by the host
    w -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay * w)

The kernel reads lr, the bias corrections, the clip factor, the step and the seed from device memory
(step_io.py).  So one captured launch serves all steps.  If step_out[APPLY] is 0, nothing changes.
weights.py stores the new w, m and v; m and v may be in bf16.
"""

import triton
import triton.language as tl

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import adamw_moments, adamw_update
from gpt2_triton.kernels.step_io import APPLY, CLIP_FACTOR, LR, M_CORRECTION, V_CORRECTION
from gpt2_triton.kernels.tuning import dtype_name, tuned
from gpt2_triton.kernels.weights import load_weights, random_words, store_moment, store_weights
from gpt2_triton.operands import Betas, Span, Step


@triton.jit(do_not_specialize=["first"])  # an index, not an address: divisibility gains nothing
def _adamw_kernel(
    w_ptr, m_ptr, v_ptr, low_ptr, g_ptr, step_out_ptr, step_in_ptr, step_key_ptr, n, first, decay,
    lr_factor, alpha1, alpha2, eps, STOCHASTIC: tl.constexpr, RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(step_out_ptr + APPLY) == 0.0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK
    i = at + tl.arange(0, BLOCK)
    mask = i < n
    lr = tl.load(step_in_ptr + LR) * lr_factor
    w = load_weights(w_ptr, low_ptr, i, mask)
    g = tl.load(g_ptr + i, mask=mask, other=0.0) * tl.load(step_out_ptr + CLIP_FACTOR)
    m = tl.load(m_ptr + i, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + i, mask=mask, other=0.0).to(tl.float32)
    m, v = adamw_moments(m, v, g, alpha1, alpha2)
    words = random_words(step_key_ptr, first + at, RANDOM, BLOCK)
    store_moment(m, m_ptr, i, mask, words)
    store_moment(v, v_ptr, i, mask, words)
    m_correction = tl.load(step_in_ptr + M_CORRECTION)
    v_correction = tl.load(step_in_ptr + V_CORRECTION)
    w -= adamw_update(w, m, v, lr, m_correction, v_correction, decay, eps)
    store_weights(w, w_ptr, low_ptr, i, mask, words, STOCHASTIC)


@contract(
    "span.w[n] span.m[n] span.v[n] span.low[n]?+ <- span.g[n] step.out[*] step.inp[8] step.key[4]"
)
def adamw(span: Span, step: Step, betas: Betas) -> None:
    """Update the span's w, m, v and low in place."""
    w, m, v, low, g, first, lr_factor, decay = span
    n = w.numel()
    dtype = dtype_name(w)
    row = tuned("adamw", dtype, BLOCK=n)
    stochastic = dtype == "bf16" and low is None
    _adamw_kernel[(triton.cdiv(n, row["BLOCK"]),)](
        w, m, v, low, g, step.out, step.inp, step.key, n, first, decay, lr_factor,
        1.0 - betas.beta1, 1.0 - betas.beta2, betas.eps, STOCHASTIC=stochastic,
        RANDOM=stochastic or "bf16" in (dtype_name(m), dtype_name(v)), **row,
    )  # fmt: skip
