"""Loss and gradient norm beside the last 128 steps': a step too far above them is not applied.

    z = (value - mean) / standard deviation (with divisor 128),   both over the last 128 values, this one included

This is llm.c's outlier detector: nothing is judged before 128 values are there, and a value enters the window whether
or not its step was applied, so that a run that has moved to another level is let through after a few steps.  Two things
differ.  Sums are taken anew in each step, where llm.c adds to running ones: no error builds up, and a resumed run needs
the values only.  A step that is not finite does not enter, where one NaN would stay in a running sum for good.
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
        seen = tl.load(row_ptr + SIZE)  # values so far; from 2 SIZE on it falls back to SIZE, and fp32 stays exact
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


@contract("step_out[4]+ window[2,W]+ z[2] <- step_in[8]")
def skip_outliers(step_out: Tensor, window: Tensor, z: Tensor, step_in: Tensor) -> None:
    """z = z-scores of the loss and the norm of step_out, 0 while the window fills; step_out[APPLY] = 0 if one is
    above its limit in step_in (0: none).

    `window` is fp32, a row for the loss and one for the norm: W - 1 values (a power of two) and how many there were.
    """
    _skip_outliers_kernel[(1,)](step_out, window, z, step_in, SIZE=window.shape[1] - 1, num_warps=1)
