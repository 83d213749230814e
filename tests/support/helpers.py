"""What the tests share: poisoned outputs, relative error, the precision of a dtype."""

import torch

from tests.conftest import DEVICE

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}  # half an ulp, relative: what one rounding costs


def poisoned(*shape, dtype=torch.float32):
    """An output never starts as zeros."""
    return torch.full(shape, float("nan"), dtype=torch.float32, device=DEVICE).to(dtype)


def error(got, want) -> float:
    """||got - want|| / ||want|| in float64; NaN in, NaN out, so `error(...) < tol` fails."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-300)).item()


def max_error(got, want) -> float:
    """max |got - want| / max |want| in float64."""
    got, want = got.double(), want.double()
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-300)).item()
