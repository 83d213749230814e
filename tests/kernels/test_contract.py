"""The register of launchers against the reference in plain torch."""

import inspect
from typing import NamedTuple

import pytest
import torch

from gpt2_triton import kernels
from gpt2_triton.kernels.contract import LAUNCHERS, Contract
from tests.support import reference

INTERNAL = {"column_sums"}  # called by launchers only


def test_every_launcher_is_an_attribute_of_the_package():
    assert all(
        getattr(kernels, name) is launcher
        for name, launcher in LAUNCHERS.items()
        if name not in INTERNAL
    )


def test_every_launcher_has_a_reference_with_its_signature():
    for name in LAUNCHERS.keys() - INTERNAL:
        launcher, exact = (
            inspect.signature(function) for function in (LAUNCHERS[name], getattr(reference, name))
        )
        assert list(launcher.parameters) == list(exact.parameters), name


class Pair(NamedTuple):
    a: torch.Tensor | None
    b: torch.Tensor | None = None


def launch(out, pair, x, acc):
    """A launcher for the tests of its contract."""


def test_a_contract_names_the_fields_of_tuples():
    tensors = Contract("out[R]+ pair.a[R] <- x[R] pair.b[R]?", launch)
    one, two, three = torch.zeros(3, 4).unbind()[:3]
    args = (one, Pair(two), three, True)
    assert tensors.outputs(args) == {"out": one, "pair.a": two}
    assert tensors.inputs(args) == {"x": three}
    tensors.check(args)
    tensors.check((one, Pair(two, three), three, True))
    with pytest.raises(ValueError, match=r"launch: pair.b is \(5,\), expected contiguous \[R\]"):
        tensors.check((one, Pair(two, torch.zeros(5)), three, True))
    for args in ((one, Pair(None), three, True), (one, None, three, True)):
        with pytest.raises(ValueError, match="launch: pair.a is None, expected a tensor"):
            tensors.check(args)
