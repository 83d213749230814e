"""GELU's device functions against float64, far into both tails."""

import pytest
import torch
import triton
import triton.language as tl

from gpt2_triton.kernels.device_math import dgelu, gelu
from tests.conftest import DEVICE
from tests.support import reference
from tests.support.helpers import poisoned

LARGE = [0.0, -1e-30, 1e-30, -20.0, 20.0, -300.0, 300.0, -1e4, 1e4]


@triton.jit
def _apply_kernel(gelu_ptr, dgelu_ptr, x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(gelu_ptr + i, gelu(x), mask=i < n)
    tl.store(dgelu_ptr + i, dgelu(x), mask=i < n)


@pytest.fixture
def values():
    """Return x, gelu(x), dgelu(x) for every 1/128 from -10 to 10, and
    large values of both signs.
    """
    x = torch.cat([torch.arange(-1280, 1281) / 128, torch.tensor(LARGE)]).to(DEVICE, torch.float32)
    outputs = poisoned(len(x)), poisoned(len(x))
    _apply_kernel[(1,)](*outputs, x, len(x), BLOCK=4096)
    return x, *outputs


# numpy warns where 1 / (1 + exp(300)) becomes 0
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gelu_and_its_derivative_match_float64(values):
    x, y, dy = values
    # an exponent of size |2u| carries 2^-24 |2u| of rounding into the sigmoid,
    # whose own value is at most 1
    for got, want in (
        (y, reference.ACTIVATIONS["gelu"](x.double())),
        (dy, reference.dactivation(x.double(), "gelu")),
    ):
        assert ((got - want).abs() <= 1e-6 * x.abs().clamp(min=1)).all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gelu_saturates_without_nan(values):
    x, y, dy = values
    assert (y[x >= 20] == x[x >= 20]).all() and (dy[x >= 20] == 1).all()
    assert (y[x <= -20].abs() < 1e-12).all() and (dy[x <= -20].abs() < 1e-9).all()
