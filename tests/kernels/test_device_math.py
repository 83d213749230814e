"""The activations' device functions against float64, far into both tails."""

import pytest
import torch
import triton
import triton.language as tl

from gpt2_triton.kernels.device_math import activation, dactivation
from tests.conftest import DEVICE
from tests.support import reference
from tests.support.helpers import poisoned

LARGE = [0.0, -1e-30, 1e-30, -20.0, 20.0, -300.0, 300.0, -1e4, 1e4, float("nan")]


@triton.jit
def _apply_kernel(y_ptr, dy_ptr, x_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, activation(x, ACT, tl.float32), mask=i < n)
    tl.store(dy_ptr + i, dactivation(x, ACT, tl.float32), mask=i < n)


def values(act: str):
    """Return x, the activation and its derivative for every 1/128 from -10 to 10, large values of
    both signs, and NaN.
    """
    x = torch.cat([torch.arange(-1280, 1281) / 128, torch.tensor(LARGE)]).to(DEVICE, torch.float32)
    outputs = poisoned(len(x)), poisoned(len(x))
    _apply_kernel[(1,)](*outputs, x, len(x), ACT=act, BLOCK=4096)
    assert all(t[-1].isnan() for t in outputs)
    return x[:-1], *(t[:-1] for t in outputs)


# numpy warns where 1 / (1 + exp(300)) becomes 0
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("act", reference.ACTIVATIONS)
def test_activation_and_derivative_match_float64(act):
    x, y, dy = values(act)
    # an exponent of size |2u| carries 2^-24 |2u| of rounding into the sigmoid,
    # whose own value is at most 1
    for got, want in (
        (y, reference.ACTIVATIONS[act](x.double())),
        (dy, reference.dactivation(x.double(), act)),
    ):
        largest = torch.maximum(x.abs(), want.abs())  # x^2 is above |x|
        assert ((got - want).abs() <= 1e-6 * largest.clamp(min=1)).all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gelu_saturates_without_nan():
    x, y, dy = values("gelu")
    assert (y[x >= 20] == x[x >= 20]).all() and (dy[x >= 20] == 1).all()
    assert (y[x <= -20].abs() < 1e-12).all() and (dy[x <= -20].abs() < 1e-9).all()
