"""Weights: numpy's split of fp32 equals the kernels', and the table of names
covers every parameter once.
"""

import numpy as np
import pytest
import torch

from gpt2_triton.checkpoint.weights import by_name
from gpt2_triton.checkpoint.weights import from_bf16 as host_from_bf16
from gpt2_triton.checkpoint.weights import join_master as host_join
from gpt2_triton.checkpoint.weights import round_bf16 as host_round
from gpt2_triton.checkpoint.weights import split_master as host_split
from tests.conftest import DEVICE
from tests.kernels.test_adamw import round_trip
from tests.support.foreign import config_of


@pytest.fixture
def values():
    """1024 numbers of both signs; the lower 16 bits are random or next to a
    boundary of the rounding.
    """
    bits = (
        np.random.default_rng(0).integers(0, 2**32, 1024, np.uint64).astype(np.uint32) & 0xBFFFFFFF
    )
    bits[:256] = (
        bits[:256] & 0xFFFF0000
        | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)[np.arange(256) % 6]
    )
    return bits.view(np.float32)


def test_split_master_equals_the_kernels(values):
    high, low, _ = round_trip(torch.from_numpy(values.view(np.int32)).to(DEVICE))
    ours_high, ours_low = host_split(values)
    assert np.array_equal(ours_high, high.cpu().view(torch.int16).numpy())
    assert np.array_equal(ours_low, low.cpu().numpy())
    assert np.array_equal(host_join(ours_high, ours_low).view(np.int32), values.view(np.int32))


def test_round_bf16_equals_torch(values):
    expected = torch.from_numpy(values).bfloat16()
    assert np.array_equal(host_round(values), expected.view(torch.int16).numpy())
    assert np.array_equal(host_from_bf16(host_round(values)), expected.float().numpy())


def test_by_name_covers_every_parameter_once():
    config = config_of()
    flat = torch.zeros(config.n_params)
    for view in by_name(flat, config.model).values():
        view.add_(1)
    start, end = 300 * 64, config.model.padded_vocab * 64
    assert (flat[:start] == 1).all() and (flat[start:end] == 0).all() and (flat[end:] == 1).all()
