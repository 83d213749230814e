"""Helpers of the tests: poisoned outputs, relative errors, the precision of a dtype."""

import torch

from tests.conftest import DEVICE

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}  # half an ulp, relative: what one rounding costs


def poisoned(*shape, dtype=torch.float32):
    """Return an output full of NaN, so that an element that a kernel does not write shows."""
    return torch.full(shape, float("nan"), dtype=torch.float32, device=DEVICE).to(dtype)


def error(got, want) -> float:
    """Return ||got - want|| / ||want|| in float64; NaN for NaN, so that `error(...) < tol` fails."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-300)).item()


def max_error(got, want) -> float:
    """Return max |got - want| / max |want| in float64."""
    got, want = got.double(), want.double()
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-300)).item()
