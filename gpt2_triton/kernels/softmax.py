"""The classifier's unnormalised probability exp(z - target's z), without overflow: a device function on fp32 values."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_MAX_EXPONENT = tl.constexpr(108.0)  # 2^108 * 50304 columns * wte still fits fp32 and bf16


@triton.jit
def unnormalised(z, zt, counted):
    """2^(log2(e) * z - zt), at most 2^108, where `counted`; else 0."""
    # a NaN must stay one: a plain minimum would turn it into 2^108, and a broken run into a finite loss
    exponent = tl.minimum(z * LOG2E - zt, _MAX_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(counted, tl.exp2(exponent), 0.0)
