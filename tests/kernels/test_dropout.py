"""Dropout's masks against Philox in numpy, and as a distribution."""

import functools

import pytest
import torch

from gpt2_triton.kernels.dropout import dropout
from gpt2_triton.operands import Dropout
from tests.conftest import DEVICE
from tests.support.helpers import error, require_same_bits
from tests.support.philox import dropout_factors

KEY = [3, 5, 1 << 30, 0]  # step, seed, the micro-batch's first row


def key(row=0, step=3):
    return torch.tensor([step, *KEY[1:3], row], dtype=torch.int32, device=DEVICE)


def kept(R, C, p, i=1, **place):
    """Return dropout of ones."""
    x = torch.ones(R, C, device=DEVICE)
    dropout(x, None, Dropout(key(**place), i, p))
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "R,C,row,i,p", [(1, 16, 0, 0, 0.5), (7, 48, 7, 96, 0.1), (33, 768, 1 << 30, 3, 0.9)]
)
def test_dropout_equals_philox_in_numpy(rng, R, C, row, i, p, dtype):
    """Also where the elements of a step pass 32 bits: 2^30 rows of 768 channels."""
    x, res = rng(R, C, dtype=dtype), rng(R, C, dtype=dtype)
    want = x.double() * dropout_factors([3, *KEY[1:3], row], R, C, i, p).to(DEVICE)
    for residual in (None, res):
        got = x.clone()
        dropout(got, residual, Dropout(key(row), i, p))
        assert error(got, want if residual is None else want + res.double()) < (
            1e-7 if dtype.itemsize == 4 else 4e-3
        )
        assert residual is not None or torch.equal(got == 0, want == 0)


def test_masks_have_the_probability_and_depend_on_step_point_and_row_only():
    R, C, p = 64, 1024, 0.2
    whole = kept(R, C, p)
    deviation = (p * (1 - p) / (R * C)) ** 0.5
    assert abs((whole == 0).double().mean() - p) < 4 * deviation
    # p is a multiple of 2^-16
    assert error(whole[whole > 0], torch.full_like(whole[whole > 0], 1 / (1 - p))) < 1e-4
    # of each channel
    assert ((whole == 0).double().mean(0) - p).abs().max() < 5 * (p * (1 - p) / R) ** 0.5
    for other in (kept(R, C, p, i=2), kept(R, C, p, step=4), kept(R, C, p, row=R)):
        both = ((whole == 0) & (other == 0)).double().mean()
        assert abs(both - p * p) < 4 * (p * p * (1 - p * p) / (R * C)) ** 0.5
    for first in (0, 1, 40):
        assert torch.equal(whole[first:], kept(R - first, C, p, row=first))


def test_dropout_gives_the_same_bits_and_writes_only_its_output():
    def run(outputs, dtype):
        x = outputs(33, 48, dtype=dtype)
        x.copy_(torch.ones_like(x))
        dropout(x, torch.ones_like(x), Dropout(key(), 1, 0.3))
        return [x]

    for dtype in (torch.float32, torch.bfloat16):
        require_same_bits(functools.partial(run, dtype=dtype), allocations=1)
