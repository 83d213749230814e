"""Helpers of the tests: poisoned outputs, relative errors, the precision of a dtype."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.conftest import DEVICE

EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}  # half an ulp, relative: what one rounding costs


def poisoned(*shape, dtype=torch.float32):
    """Return an output full of NaN, so that an element that a kernel does not write shows."""
    return torch.full(shape, float("nan"), dtype=torch.float32, device=DEVICE).to(dtype)


class Guarded:
    """Makes outputs, each inside a larger buffer of sevens, 4096 elements from both ends."""

    def __init__(self):
        self._made = []

    def __call__(self, *shape, dtype=torch.float32):
        size = torch.Size(shape).numel()
        buffer = torch.full((4096 + size + 4096,), 7, device=DEVICE, dtype=dtype)
        self._made.append((buffer, size))
        return buffer[4096 : 4096 + size].view(*shape)

    def intact(self) -> int:
        """Return the number of outputs; AssertionError if an element beside one of them was written."""
        for buffer, size in self._made:
            assert (buffer[:4096] == 7).all() and (buffer[4096 + size :] == 7).all()
        return len(self._made)


def require_same_bits_within_outputs(run: Callable[[Any], Sequence[torch.Tensor]], allocations: int) -> None:
    """Let run(outputs) give equal bits twice, and write only what outputs(*shape, dtype) allocates."""
    for first, second in zip(run(poisoned), run(poisoned), strict=True):
        assert torch.isfinite(first).all() and torch.equal(first, second)
    guarded = Guarded()
    run(guarded)
    assert guarded.intact() == allocations


def error(got, want) -> float:
    """Return ||got - want|| / ||want|| in float64; NaN for NaN, so that `error(...) < tol` fails."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-300)).item()


def max_error(got, want) -> float:
    """Return max |got - want| / max |want| in float64."""
    got, want = got.double(), want.double()
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-300)).item()
