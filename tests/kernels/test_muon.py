"""Muon's kernels against their reference in float64, symmetric bits, and bits that do not
depend on other matrices.
"""

import math

import pytest
import torch

from gpt2_triton.kernels import muon
from gpt2_triton.kernels.muon import (
    muon_apply,
    muon_gram,
    muon_momentum,
    muon_normalise,
    muon_normalise_scratch,
    muon_poly,
    muon_update,
)
from gpt2_triton.operands import Matrices, Step
from tests.conftest import DEVICE
from tests.kernels.test_adamw import rounded
from tests.support import reference
from tests.support.helpers import dtypes, error, exact, poisoned

F32, BF16 = torch.float32, torch.bfloat16
# sums of up to 192 products, 6e-8 each; one rounding of the result, which the interpreter truncates
TOLERANCE = {F32: 1e-6, BF16: 2e-3 if DEVICE == "cuda" else 4e-3}
SHAPES = [(80, 80), (48, 192), (192, 48)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
SMALL = {
    "muon_symmetric": dict(BLOCK=64, BLOCK_K=64),
    "muon_apply": dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, GROUP_M=2),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Several tiles, of which the last ones reach over the edge: as for C 1600 on a GPU."""
    tuned = muon.tuned
    monkeypatch.setattr(
        muon, "tuned", lambda op, dtype, **sizes: tuned(op, dtype, **sizes) | SMALL.get(op, {})
    )


def every_other(*shape, dtype=F32):
    """Return matrices full of NaN with room for another one after each."""
    return poisoned(2 * shape[0], *shape[1:], dtype=dtype)[::2]


def step(lr=0.0, factor=1.0, applied=1.0):
    nan = float("nan")
    out = torch.tensor([nan, nan, factor, applied], device=DEVICE)
    key = torch.tensor([3, 5, 0, 0], dtype=torch.int32, device=DEVICE)  # step and seed
    return Step(out, torch.tensor([lr, *[nan] * 7], device=DEVICE), key)


FLAT = dict(first=64, distance=4096, momentum=0.95)


@dtypes
@shapes
def test_products_equal_their_reference(rng, small_blocks, shape, dtype):
    x = every_other(2, *shape, dtype=dtype)
    x.copy_(rng(2, *shape) / math.sqrt(max(shape)))
    C = min(shape)
    gram, poly, out = (
        poisoned(2, C, C, dtype=dtype),
        poisoned(2, C, C, dtype=dtype),
        every_other(2, *shape, dtype=dtype),
    )
    muon_gram(gram, x)
    assert error(gram, exact("muon_gram", [gram], x)[0]) < TOLERANCE[dtype]
    muon_poly(poly, gram, -2.5, 0.5)
    assert error(poly, exact("muon_poly", [poly], gram, -2.5, 0.5)[0]) < TOLERANCE[dtype]
    muon_apply(out, x, poly, 3.5)
    assert error(out, exact("muon_apply", [out], x, poly, 3.5)[0]) < TOLERANCE[dtype]
    for symmetric in (gram, poly):
        assert torch.equal(symmetric, symmetric.mT)


def test_bits_of_a_matrix_do_not_depend_on_the_others(rng, small_blocks):
    x = rng(4, 80, 80)
    scratch = poisoned(muon_normalise_scratch(4, 80, 80))

    def chain(x):
        other, gram, poly, out = (poisoned(len(x), 80, 80) for _ in range(4))
        muon_normalise(other, scratch, x)
        muon_gram(gram, other)
        muon_poly(poly, gram, -2.5, 0.5)
        muon_apply(out, other, poly, 3.5)
        return out

    together = chain(x)
    assert torch.equal(together[2:3], chain(x[2:3])) and torch.equal(together[1::2], chain(x[1::2]))


def test_normalised_matrices_have_norms_a_little_below_one(rng):
    """A matrix of zeros stays zeros."""
    sizes = torch.tensor([1e-9, 1e3, 0.0], device=DEVICE)[:, None, None]
    x, out = rng(3, 48, 192) * sizes, every_other(3, 48, 192)
    muon_normalise(out, poisoned(muon_normalise_scratch(3, 48, 192)), x)
    norms = torch.linalg.matrix_norm(x.double()).clamp(min=1e-12)[:, None, None]
    assert error(out, x.double() / 1.02 / norms) < TOLERANCE[F32]


@dtypes
def test_momentum_equals_its_reference_over_three_steps(rng, dtype):
    m, x = every_other(3, 700), every_other(3, 700, dtype=dtype)
    m.zero_()
    exact_m, exact_x = m.double(), x.double()
    for factor in (1.0, 0.5, 1.0):
        g = rng(3, 1400)[:, 300:1000]
        muon_momentum(Matrices(m=m, g=g, x=x, **FLAT), step(factor=factor))
        exactly = Matrices(m=exact_m, g=g.double(), x=exact_x, **FLAT)
        reference.muon_momentum(exactly, step(factor=factor))
    assert error(m, exact_m) < TOLERANCE[F32] and error(x, exact_x) < TOLERANCE[dtype]


def test_momentum_in_bf16_is_rounded_as_adamw_rounds(rng):
    m, x, g = every_other(2, 700, dtype=BF16), poisoned(2, 700), rng(2, 700)
    exact_m, exact_x = m.copy_(rng(2, 700)).float(), poisoned(2, 700)
    for array, momentum in ((x, m), (exact_x, exact_m)):
        muon_momentum(Matrices(m=momentum, g=g, x=array, **FLAT), step())
    assert torch.equal(x, exact_x)
    for l, first in enumerate((64, 64 + 4096)):
        assert torch.equal(m[l].view(torch.int16), rounded(exact_m[l], 5, first, 3, shift=16))


def updated(w, x, storage, first=64, applied=1.0):
    """Return the weights, and their lower bits, after an update of them."""
    w = w.to(F32 if storage == "fp32" else BF16, copy=True)
    low = torch.zeros(w.shape, dtype=torch.int16, device=DEVICE) if storage == "master" else None
    matrices = Matrices(w, low, x=x, first=first, distance=4096, decay=0.1, scale=8.0)
    muon_update(matrices, step(lr=0.02, applied=applied))
    return w, low


@pytest.mark.parametrize("storage", ["fp32", "bf16", "master"])
def test_update_is_rounded_as_adamw_rounds(rng, storage):
    w, x = rng(2, 700, dtype=BF16), rng(2, 700).to(F32 if storage == "fp32" else BF16) / 30
    w_new, low = updated(w, x, storage)
    matrices = Matrices(w, x=x, decay=0.1, scale=8.0)
    [exactly] = exact("muon_update", [matrices], step(lr=0.02))
    if storage == "bf16":  # bit for bit what test_adamw.py's numpy makes of the fp32 update
        fp32, _ = updated(w.float(), x.float(), "fp32")
        for row, first in enumerate((64, 64 + 4096)):
            assert torch.equal(w_new[row].view(torch.int16), rounded(fp32[row], 5, first, 3))
        return
    if storage == "master":
        bits = ((w_new.view(torch.int16).int() << 16) | (low.int() & 0xFFFF)) - (
            low < 0
        ).int() * 0x10000
        w_new = bits.view(F32)
    assert error(w_new, exactly.w) < TOLERANCE[F32]


def test_skipped_step_changes_no_byte(rng):
    m, x = rng(2, 100), rng(2, 100)
    before = m.clone(), x.clone()
    muon_momentum(Matrices(m=m, g=poisoned(2, 100), x=x, **FLAT), step(applied=0.0))
    assert torch.equal(m, before[0]) and torch.equal(x, before[1])
    w, low = updated(rng(2, 100, dtype=BF16), poisoned(2, 100), "master", applied=0.0)
    assert torch.isfinite(w).all() and not low.any()


def test_wrong_sizes_are_refused():
    x = torch.zeros(2, 32, 64, device=DEVICE)
    with pytest.raises(AssertionError, match="gram has 64 rows, expected 32"):
        muon_gram(torch.zeros(2, 64, 64, device=DEVICE), x)
    with pytest.raises(ValueError, match="muon_gram: x is"):
        muon_gram(torch.zeros(2, 32, 32, device=DEVICE), x.mT)
