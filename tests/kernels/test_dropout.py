"""Dropout's masks against Philox in numpy."""

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


def test_dropout_gives_the_same_bits_and_writes_only_its_output():
    def run(outputs, dtype):
        x = outputs(33, 48, dtype=dtype)
        x.copy_(torch.ones_like(x))
        dropout(x, torch.ones_like(x), Dropout(key(), 1, 0.3))
        return [x]

    for dtype in (torch.float32, torch.bfloat16):
        require_same_bits(functools.partial(run, dtype=dtype), allocations=1)
