"""Outlier detection: a step is skipped if its loss or gradient norm is too
far above the last 128 steps.

    z = (value - mean) / standard deviation (with divisor 128),
    both over the last 128 values, this one included

This is llm.c's outlier detector.  No step is skipped before the window holds 128 values.  A skipped
step's value enters the window too, so that a run that has moved to another level continues after a
few steps.  Two things differ.  Each step sums the window again, where llm.c updates running sums:
no error accumulates, and a resumed run needs only the values.  A non-finite step does not enter the
window; one NaN would stay in a running sum.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.step_io import APPLY, LOSS, LOSS_LIMIT


@triton.jit
def _skip_outliers_kernel(step_out_ptr, window_ptr, z_ptr, step_in_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    apply = tl.load(step_out_ptr + APPLY)
    if apply == 0.0:  # not finite
        tl.store(z_ptr, 0.0)
        tl.store(z_ptr + 1, 0.0)
        return
    for which in tl.static_range(2):  # loss, norm
        row_ptr = window_ptr + which * (SIZE + 1)
        value = tl.load(step_out_ptr + LOSS + which)
        # values so far; the count goes from 2 SIZE back to SIZE, so fp32 is exact
        seen = tl.load(row_ptr + SIZE)
        values = tl.where(i == seen.to(tl.int32) % SIZE, value, tl.load(row_ptr + i))
        largest = tl.maximum(tl.max(tl.abs(values), 0), 1e-30)
        scaled = values / largest  # the square of a norm of 1e19 would be beyond fp32
        mean = tl.sum(scaled, 0) / SIZE
        deviation = tl.sqrt(tl.sum((scaled - mean) * (scaled - mean), 0) / SIZE)
        z = tl.where(deviation > 0.0, (value / largest - mean) / tl.maximum(deviation, 1e-30), 0.0)
        z = tl.where(seen >= SIZE, z, 0.0)
        limit = tl.load(step_in_ptr + LOSS_LIMIT + which)
        apply = tl.where((limit > 0.0) & (z > limit), 0.0, apply)
        tl.store(z_ptr + which, z)
        tl.store(row_ptr + i, values)
        tl.store(row_ptr + SIZE, tl.where(seen + 1.0 == 2.0 * SIZE, 1.0 * SIZE, seen + 1.0))
    tl.store(step_out_ptr + APPLY, apply)


@contract("step_out[*]+ window[2,W]+ z[2] <- step_in[8]")
def skip_outliers(step_out: Tensor, window: Tensor, z: Tensor, step_in: Tensor) -> None:
    """Write z, the z-scores of step_out's loss and norm, 0 while the window fills; clear
    step_out[APPLY] if one is above its limit in step_in (limit 0: never).

    `window` is fp32, a row for the loss and one for the norm: W - 1 values (a power of
    two) and the number seen so far.
    """
    _skip_outliers_kernel[(1,)](step_out, window, z, step_in, SIZE=window.shape[1] - 1, num_warps=1)
