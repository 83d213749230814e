"""Indices into the small device rows through which the host and the kernels
exchange the numbers of a step.

step_in   fp32[8], written by the host before the step
step_out  fp32[6], read by the host after it
step_key  int32[4], written by the host: the Philox key of rounding noise and
          dropout; ROW before each micro-step

The indices are constexpr because kernels can read no other globals.  The host indexes numpy arrays
and lists with them as they are, and tensors with their `.value`.
"""

import triton.language as tl

LR = tl.constexpr(0)
M_CORRECTION = tl.constexpr(1)  # 1 / (1 - beta1^t), with t = step + 1
V_CORRECTION = tl.constexpr(2)  # 1 / (1 - beta2^t)
LOSS_SCALE = tl.constexpr(3)  # 1 / tokens of the step
CLIP = tl.constexpr(4)  # largest gradient norm; 0: none
LOSS_LIMIT = tl.constexpr(5)  # largest z-score of the loss; 0: none
NORM_LIMIT = tl.constexpr(6)  # the same for the norm
STOP = tl.constexpr(7)  # 1 if this rank received a signal; STOPPING is the sum over ranks
STEP_IN = 8

LOSS = tl.constexpr(0)
NORM = tl.constexpr(1)  # of the gradient, before clipping
CLIP_FACTOR = tl.constexpr(2)
APPLY = tl.constexpr(3)  # 1, or 0 if the update is to change nothing
SUM_SQUARES = tl.constexpr(4)  # of the gradient
STOPPING = tl.constexpr(5)  # ranks that were asked to stop
STEP_OUT = 6

STEP = tl.constexpr(0)
SEED_LOW = tl.constexpr(1)
SEED_HIGH = tl.constexpr(2)
ROW = tl.constexpr(3)  # the row of the step, on all ranks, with which the micro-batch begins
STEP_KEY = 4
