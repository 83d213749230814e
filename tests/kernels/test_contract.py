"""The register of launchers against the reference in plain torch."""

import inspect

from gpt2_triton import kernels
from gpt2_triton.kernels.contract import LAUNCHERS
from tests.support import reference

INTERNAL = {"column_sums"}  # called by launchers only
# the reference has no fp8: test_fp8.py
FP8 = {"cast_operand", "cast_weights", "check_amax", "roll_scales", "fp8_stats"}


def test_every_launcher_is_an_attribute_of_the_package():
    assert all(
        getattr(kernels, name) is launcher
        for name, launcher in LAUNCHERS.items()
        if name not in INTERNAL
    )


def test_every_launcher_has_a_reference_with_its_signature():
    for name in LAUNCHERS.keys() - INTERNAL - FP8:
        launcher, exact = (
            inspect.signature(function) for function in (LAUNCHERS[name], getattr(reference, name))
        )
        assert list(launcher.parameters) == list(exact.parameters), name
