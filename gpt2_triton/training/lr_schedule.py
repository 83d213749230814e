"""The learning rate, and the other numbers that the host computes for the update of each step.

`step` counts from 0; W = warmup, N = steps, low = final_frac * lr, D = (1 - wsd_decay_frac) * N.
    step < W    lr * (step + 1) / W, which first reaches lr at step W - 1; after the warmup:
    constant    lr
    cosine      low + (lr - low) * (1 + cos(pi * r)) / 2                r = (step - W) / (N - W)
    linear      lr - (lr - low) * r                                     the same r
    wsd         lr until D, then low + (lr - low) * (1 - sqrt(q))       q = (step - D) / (N - D)
    trapezoid   lr until D, then lr - (lr - low) * q                    the same q
r and q would be 1 at step N, so the last step, N - 1, is a little above low.  All curves
but trapezoid are as in llm.c.
"""

import math
from typing import Any

import numpy as np

from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import OptimConfig
from gpt2_triton.kernels import step_io as io


def learning_rate(step: int, optim: OptimConfig, steps: int) -> float:
    """Return the learning rate of a step, 0 <= step < steps."""
    assert 0 <= step < steps
    lr = optim.lr
    if step < optim.warmup:
        return lr * (step + 1) / optim.warmup
    low = optim.final_frac * lr
    r = (step - optim.warmup) / (steps - optim.warmup)
    if optim.schedule == "cosine":
        return low + (lr - low) * 0.5 * (1 + math.cos(math.pi * r))
    if optim.schedule == "linear":
        return lr - (lr - low) * r
    decay_start = (1 - optim.wsd_decay_frac) * steps
    if optim.schedule == "constant" or step < decay_start:
        return lr
    q = (step - decay_start) / (steps - decay_start)
    fallen = math.sqrt(q) if optim.schedule == "wsd" else q
    return low + (lr - low) * (1 - fallen)


def changes_on_resume(step: int, saved: dict[str, Any], config: Config) -> list[str]:
    """Return lines if a run continues after `step` steps at another rate, or optim.tau's
    decay, than it had planned.
    """
    lines = []
    then = OptimConfig.model_construct(**saved["optim"])
    steps = saved["train"]["steps"]
    last = learning_rate(step - 1, then, steps)
    planned = learning_rate(step, then, steps) if step < steps else last
    rate = learning_rate(step, config.optim, config.train.steps)
    if not math.isclose(rate, planned):
        lines.append(
            f"learning rate: {last:.2e} at step {step}, "
            f"{rate:.2e} at step {step + 1}: its schedule has changed"
        )
    decay = config.model_copy(update=dict(optim=then)).replace(train=dict(steps=steps)).weight_decay
    if config.optim.tau is not None and not math.isclose(decay, config.weight_decay):
        lines.append(
            f"weight decay: {decay:.3g} -> {config.weight_decay:.3g}, by optim.tau, "
            "optim.lr and train.steps"
        )
    return lines


def step_inputs(step: int, config: Config) -> np.ndarray:
    """Return the fp32 row step_in, with the elements that kernels/step_io.py names; STOP is 0."""
    o = config.optim
    train = config.train
    t = step + 1
    row = np.zeros(io.STEP_IN, np.float32)
    row[io.LR] = learning_rate(step, o, train.steps)
    row[io.M_CORRECTION] = 1 / (1 - o.beta1**t)
    row[io.V_CORRECTION] = 1 / (1 - o.beta2**t)
    row[io.LOSS_SCALE] = 1.0 / train.step_tokens
    row[io.CLIP] = o.clip
    row[io.LOSS_LIMIT] = train.skip_loss_z
    row[io.NORM_LIMIT] = train.skip_norm_z
    return row
