"""The outlier detector, as llm.c's, against the reference in float64,
and its effect on the step.
"""

import math

import numpy as np
import pytest
import torch

from gpt2_triton.kernels.outlier import skip_outliers
from gpt2_triton.model.tables import WINDOW
from tests.conftest import DEVICE
from tests.support import reference
from tests.support.helpers import poisoned
from tests.support.reference import io

SIZE = 16  # any power of two works; the interpreter takes 4 ms per launch


class Device:
    """The kernel with its memory; judge() returns (z of the loss, z of the norm,
    whether the step is applied).
    """

    def __init__(self, loss_limit=0.0, norm_limit=0.0, size=SIZE):
        self.window = torch.zeros(2, size + 1, device=DEVICE)
        self.step_in = torch.tensor(
            [math.nan] * 5 + [loss_limit, norm_limit, math.nan], device=DEVICE
        )

    def judge(self, loss, norm, finite=1.0):
        step_out, z = torch.tensor([loss, norm, 0.5, finite], device=DEVICE), poisoned(2)
        skip_outliers(step_out, self.window, z, self.step_in)
        assert step_out[io.CLIP_FACTOR] == 0.5
        return *z.tolist(), bool(step_out[io.APPLY] == 1)


def series(n, spikes=(20, 30)):
    """Return fp32 losses that fall with noise, and norms about 0.4, with one spike each."""
    generator = np.random.default_rng(0)
    losses = 3.3 - 1e-4 * np.arange(n) + 0.03 * generator.standard_normal(n)
    norms = 0.4 + 0.05 * np.abs(generator.standard_normal(n))
    losses[spikes[0]], norms[spikes[1]] = 9.0, 40.0
    return losses.astype(np.float32).tolist(), norms.astype(np.float32).tolist()


def test_skip_outliers_matches_the_reference():
    """After 300 steps the window has wrapped twice, the count once; fp32 of
    3.3 +- 0.03 has five digits.
    """
    device, window, z = (
        Device(3.0, 3.0, WINDOW),
        torch.zeros(2, WINDOW + 1).double(),
        torch.zeros(2).double(),
    )
    for step, (loss, norm) in enumerate(zip(*series(300, spikes=(130, 200)))):
        got = device.judge(loss, norm)
        step_out = torch.tensor([loss, norm, 0.5, 1.0]).double()
        reference.skip_outliers(step_out, window, z, device.step_in.cpu().double())
        np.testing.assert_allclose(got[:2], z.tolist(), rtol=1e-4, atol=1e-4)
        assert got[2] == bool(step_out[io.APPLY]) and (got[:2] == (0, 0)) == (step < WINDOW)
    assert torch.equal(device.window.cpu().double(), window)


@pytest.mark.parametrize(
    "limits, skipped", [((0, 0), []), ((3, 0), [20]), ((0, 3), [30]), ((3, 3), [20, 30])]
)
def test_skip_outliers_skips_only_above_the_limit(limits, skipped):
    device = Device(*limits)
    applied = [device.judge(*pair)[2] for pair in zip(*series(40))]
    assert [step for step, ok in enumerate(applied) if not ok] == skipped


def test_skip_outliers_keeps_non_finite_steps_out_of_the_window():
    losses, norms = series(40)
    clean, dirty = Device(3.0, 3.0), Device(3.0, 3.0)
    for step, pair in enumerate(zip(losses, norms)):
        if step % 10 == 7:
            assert dirty.judge(math.nan, math.inf, finite=0.0)[2] is False
        assert clean.judge(*pair)[2] == dirty.judge(*pair)[2]
    assert torch.equal(clean.window, dirty.window)


def test_skip_outliers_of_equal_values_and_of_huge_norms():
    device = Device(3.0, 3.0)
    for _ in range(SIZE + 2):
        z_loss, z_norm, applied = device.judge(2.5, 1.0)
    assert (z_loss, z_norm, applied) == (0.0, 0.0, True)
    assert device.judge(2.5, 1.8e19) == (0.0, pytest.approx(math.sqrt(SIZE - 1), rel=1e-5), False)
