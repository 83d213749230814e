"""Philox against Random123's known answers, and the initial weights number by number."""

import importlib
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpt2_triton.kernels.philox import fill, normal_init, philox_words
from gpt2_triton.kernels.tuning import INTERPRET
from tests.conftest import DEVICE
from tests.support.helpers import Guarded, poisoned
from tests.support.philox import philox

random_module = importlib.import_module("gpt2_triton.kernels.philox")

SEED = (0x299F31D0 << 32) | 0x24A0D3B5
N = 1 << 18
# fp32: an angle of up to 2 pi is off by 6e-7, times a radius of up to 5.8, and as much again
ROUNDING = 8e-6
# first; counters of groups of four pass 32 bits at 2^34
PLACES = [0, 4, 2**31 - 4, 2**31, 2**34 - 8, 2**34 + 12]


def normals(seed, first, n):
    """Return N(0, 1) numbers from these words by the Box-Muller transform, in float64."""
    words = philox(seed, first, n + n % 2, 0, 0).reshape(-1, 2) >> 8
    radius = np.sqrt(-2 * np.log((words[:, 0] + 1.0) / 2**24))
    angle = words[:, 1] * (2 * math.pi / 2**24)
    return torch.from_numpy(
        np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)[:n]
    ).to(DEVICE)


@triton.jit
def _words_kernel(out_ptr, key_ptr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    words = philox_words(
        tl.load(key_ptr), tl.load(key_ptr + 1), tl.load(key_ptr + 2).to(tl.int32), PURPOSE, BLOCK
    )
    tl.store(out_ptr + tl.arange(0, BLOCK), words.to(tl.int32, bitcast=True))


def words(seed, first, n, step, purpose):
    out = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    _words_kernel[(1,)](
        out, torch.tensor([seed, first, step], device=DEVICE), PURPOSE=purpose, BLOCK=n
    )
    return out.cpu().numpy().view(np.uint32)


def draw(n, seed=SEED, first=0, std=1.0):
    w = poisoned(n)
    normal_init(w, None, seed, first, std)
    return w


def test_philox_reference_gives_random123s_known_answers():
    """From kat_vectors of Random123: counter and key of zeros; counter and
    key from the digits of pi.
    """
    zeros = philox(0, 0, 4, 0, 0)
    assert [f"{word:08x}" for word in zeros] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    pi = philox(
        0x299F31D0A4093822, 4 * ((0x85A308D3 << 32) | 0x243F6A88), 4, 0x13198A2E, 0x03707344
    )
    assert [f"{word:08x}" for word in pi] == ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]


@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize(
    "seed,step,purpose", [(0, 0, 0), (1, 1, 1), (SEED, 12345, 1), (2**62 - 1, 2**31 - 1, 0)]
)
def test_philox_words_match_the_reference(seed, first, step, purpose):
    assert np.array_equal(
        words(seed, first, 64, step, purpose), philox(seed, first, 64, step, purpose)
    )


@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize("seed,n", [(0, 1), (1, 7), (SEED, 1000)])
def test_normal_init_matches_float64(seed, first, n):
    want = 0.02 * normals(seed, first, n)
    assert (draw(n, seed, first, 0.02) - want).abs().max() < 0.02 * ROUNDING


@pytest.mark.parametrize("block", [16, 128, 512])
def test_normal_init_does_not_depend_on_the_block(monkeypatch, block):
    whole = draw(1030)
    monkeypatch.setattr(random_module, "flat_block", lambda n, on_gpu: block)
    assert torch.equal(whole, draw(1030))


def test_normal_init_in_bf16_rounds_the_fp32_number():
    exact, w = draw(5000), poisoned(5000, dtype=torch.bfloat16)
    normal_init(w, None, SEED, 0, 1.0)
    if INTERPRET:  # the interpreter truncates
        assert ((exact - w.float()).abs() < 2.0**-7 * exact.abs()).all()
    else:
        assert torch.equal(w, exact.bfloat16())


def test_normal_init_with_low_bits_keeps_the_fp32_number():
    exact, w = draw(5000), poisoned(5000, dtype=torch.bfloat16)
    low = torch.full((5000,), 7, dtype=torch.int16, device=DEVICE)
    normal_init(w, low, SEED, 0, 1.0)
    bits = exact.view(torch.int32)
    assert torch.equal(low, (bits & 0xFFFF).to(torch.int16))
    assert torch.equal(w.view(torch.int16), ((bits + 0x8000) >> 16).to(torch.int16))


@pytest.mark.parametrize(
    "dtype,value", [(torch.float32, 0.1), (torch.bfloat16, 1.0), (torch.int16, 0)]
)
@pytest.mark.parametrize("n", [1, 7, 1000, N + 5])
def test_fill_sets_all_elements(n, dtype, value):
    w = torch.full((n,), 9, device=DEVICE, dtype=dtype)
    fill(w, value)
    assert torch.equal(w, torch.full_like(w, value))


def test_normal_init_and_fill_write_only_their_outputs():
    for dtype in (torch.float32, torch.bfloat16):
        for n in (1, 1001, N + 5):
            outputs = Guarded()
            w, low = outputs(n, dtype=dtype), outputs(n, dtype=torch.int16)
            fill(w, 2.0)
            normal_init(w, low if dtype == torch.bfloat16 else None, SEED, 0, 1.0)
            assert outputs.intact() == 2


@pytest.mark.gpu
def test_normal_init_beyond_int32_on_gpu():
    """With more elements than an int32 can index."""
    n = (1 << 31) + 1001
    w = torch.empty(n, device=DEVICE, dtype=torch.bfloat16)
    normal_init(w, None, SEED, 0, 1.0)
    for first in (0, 1 << 30, (1 << 31) - 1000):
        want = normals(SEED, first, 2001 if first else 1001)
        assert (
            (w[first : first + len(want)] - want).abs() <= 2.0**-8 * want.abs() + ROUNDING
        ).all()
    fill(w, 2.0)
    assert w[-1] == 2 and w[1 << 30] == 2
