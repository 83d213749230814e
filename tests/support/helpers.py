"""Helpers of the tests: parameters, poisoned outputs, relative errors, the precision of a dtype."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gpt2_triton.kernels.tuning import INTERPRET
from tests.conftest import DEVICE
from tests.support import reference
from tests.support.launchers import mapped

DTYPES = [torch.float32, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
accumulate = pytest.mark.parametrize("acc", [False, True], ids=["overwrite", "accumulate"])
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# half an ulp, relative: what one rounding costs
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}


def tolerance(dtype: torch.dtype, *, fp32: float, roundings: float = 1) -> float:
    """Return `fp32`, or what so many roundings to bf16 cost; the interpreter truncates, which
    costs twice that.
    """
    return fp32 if dtype == torch.float32 else roundings * EPS[dtype] * (2 if INTERPRET else 1)


def poisoned(*shape, dtype=torch.float32):
    """Return an output full of NaN, so that an element that a kernel does not write shows."""
    return torch.full(shape, float("nan"), dtype=torch.float32, device=DEVICE).to(dtype)


def scratch_of(elements):
    """Return scratch for a launcher, which takes no empty one."""
    return poisoned(max(1, elements))


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
        """Return the number of outputs; AssertionError if an element
        beside one of them was written.
        """
        for buffer, size in self._made:
            assert (buffer[:4096] == 7).all() and (buffer[4096 + size :] == 7).all()
        return len(self._made)


def require_same_bits(run: Callable[[Any], Sequence[torch.Tensor]], allocations: int) -> None:
    """Let run(outputs) give equal bits twice, and write only what
    outputs(*shape, dtype) allocates.
    """
    for first, second in zip(run(poisoned), run(poisoned), strict=True):
        assert torch.isfinite(first).all() and torch.equal(first, second)
    guarded = Guarded()
    run(guarded)
    assert guarded.intact() == allocations


def exact(launcher: str, outputs, *inputs, **options):
    """Return what the reference's launcher writes in float64; `outputs` hold what it adds
    to, None what is left out.
    """

    def wide(argument):
        return mapped(argument, lambda t: t.double() if t.is_floating_point() else t)

    results = [wide(t) for t in outputs]
    getattr(reference, launcher)(*results, *map(wide, inputs), **options)
    return results


def error(got, want) -> float:
    """Return ||got - want|| / ||want|| in float64; NaN for NaN, so that
    `error(...) < tol` fails.
    """
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-300)).item()


def max_error(got, want) -> float:
    """Return max |got - want| / max |want| in float64."""
    got, want = got.double(), want.double()
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-300)).item()
