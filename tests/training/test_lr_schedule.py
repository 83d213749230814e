"""Learning rates against closed forms at the steps that define them, and
the inputs of the update.
"""

import math
from typing import get_args

import numpy as np
import pytest

from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import OptimConfig
from gpt2_triton.training.lr_schedule import changes_on_resume, learning_rate, step_inputs

STEPS, WARMUP, LR = 1000, 100, 6e-4


def curve(schedule, **keys):
    optim = OptimConfig(lr=LR, warmup=WARMUP, schedule=schedule, **keys)
    return [learning_rate(step, optim, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("schedule", get_args(OptimConfig.model_fields["schedule"].annotation))
def test_learning_rate_of_each_name_warms_up_linearly_to_the_peak(schedule):
    lrs = curve(schedule)
    assert lrs[:WARMUP] == pytest.approx([LR * n / WARMUP for n in range(1, WARMUP + 1)])
    assert lrs[WARMUP - 1] == max(lrs) == LR


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        ("linear", 550, 0.55), ("constant", 550, 1), ("wsd", 799, 1), ("trapezoid", 799, 1),
        ("wsd", 850, 0.1 + 0.9 * (1 - math.sqrt(0.25))), ("trapezoid", 850, 0.1 + 0.9 * 0.75),
    ],
)  # fmt: skip
def test_learning_rate_is_constant_or_falls_linearly_or_with_the_square_root(schedule, step, share):
    """The cosine is that of nanoGPT, below."""
    rate = curve(schedule, final_frac=0.1, wsd_decay_frac=0.2)[step]
    assert rate == pytest.approx(share * LR)


def resumed(step, then, now, steps=(6, 12)):
    """Return the lines about a run of steps[0] steps that goes on after
    `step` steps to steps[1].
    """
    optim = [dict(lr=LR, warmup=1, final_frac=0.0) | keys for keys in (then, now)]
    saved, config = (dict(optim=o, train=dict(steps=n)) for o, n in zip(optim, steps))
    return changes_on_resume(step, saved, Config.model_validate(config))


def test_a_resume_tells_how_its_learning_rate_differs_from_the_plan():
    """A cosine of 6 steps ends near 0, but of 12 steps it is near the peak there; a
    constant rate has no end.
    """
    rates = [
        learning_rate(5, OptimConfig(lr=LR, warmup=1), 6),
        learning_rate(6, OptimConfig(lr=LR, warmup=1), 12),
    ]
    line = "learning rate: {:.2e} at step 6, {:.2e} at step 7: its schedule has changed".format(
        *rates
    )
    assert resumed(6, {}, {}) == [line] and rates[1] > 5 * rates[0]
    assert resumed(3, {}, dict(lr=2 * LR), steps=(6, 6))[0].startswith(
        "learning rate: 5.43e-04 at step 3, 7.8"
    )
    for same in ({}, dict(schedule="constant"), dict(schedule="wsd")):
        assert resumed(2, same, same | dict(eps=1e-6), steps=(6, 12 if same else 6)) == []
    assert resumed(6, *[dict(schedule="constant")] * 2) == []


def test_a_resume_tells_the_decay_that_tau_now_gives():
    """Twice the steps halve it."""
    tau = dict(schedule="constant", weight_decay=None, tau=6 * LR)
    line = "weight decay: {} -> {}, by optim.tau, optim.lr and train.steps"
    assert (
        resumed(2, tau, tau) == [line.format(1, 0.5)] and resumed(2, tau, tau, steps=(6, 6)) == []
    )
    assert resumed(2, dict(schedule="constant"), tau) == [line.format(0.1, 0.5)]


def nanogpt_rate(it, warmup, end, low):
    """Return nanoGPT's learning rate: its warmup divides by warmup + 1."""
    if it < warmup:
        return LR * (it + 1) / (warmup + 1)
    return low + (LR - low) * 0.5 * (1 + math.cos(math.pi * (it - warmup) / (end - warmup)))


def test_learning_rates_of_nanogpt_are_had_with_a_step_more_of_warmup_and_in_all():
    """Its steps are 0 to max_iters.  Its warmup comes out exactly, its decay one step
    later: docs/guide/interop.md.
    """
    warmup, end, low = 100, 1000, 0.1 * LR
    optim = OptimConfig(lr=LR, warmup=warmup + 1, final_frac=0.1)
    ours = [learning_rate(step, optim, end + 1) for step in range(end + 1)]
    theirs = [nanogpt_rate(it, warmup, end, low) for it in range(end + 1)]
    assert ours[: warmup + 1] == pytest.approx(theirs[: warmup + 1], rel=1e-12)  # fp64 rounding
    assert ours[warmup + 1 :] == pytest.approx(theirs[warmup:-1], rel=1e-12)


def test_learning_rate_of_a_run_that_is_all_warmup_or_has_none():
    assert learning_rate(9, OptimConfig(lr=LR, warmup=10), 10) == LR
    assert learning_rate(0, OptimConfig(lr=LR, warmup=0), 10) == LR


def test_step_inputs_are_the_rounded_closed_forms():
    config = Config.model_validate(
        dict(optim=dict(clip=0.5), train=dict(total_batch_tokens=1 << 18))
    )
    row = step_inputs(2, config)
    lr = learning_rate(2, config.optim, config.train.steps)
    assert row.dtype == np.float32 and row.shape == (8,)
    # each is rounded to float32 once
    want = np.float32([lr, 1 / (1 - 0.9**3), 1 / (1 - 0.95**3), 2**-18, 0.5, 0, 0, 0])
    assert np.array_equal(row, want)
