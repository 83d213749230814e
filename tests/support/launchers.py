"""The kernel package with something done at each launch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

import gpt2_triton.kernels as kernels
from gpt2_triton.kernels.contract import LAUNCHERS, Contract
from gpt2_triton.operands import Fp8


class WrappedKernels:
    """gpt2_triton.kernels, with `_launch(name, *arguments)` of a subclass in
    the place of each launcher.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in LAUNCHERS:
            return getattr(kernels, name)
        launch: Any = functools.partial(self._launch, name)
        launch.contract = LAUNCHERS[name].contract  # as statistics read it
        return launch

    def _launch(self, name: str, *args: Any, **keywords: Any) -> None:
        raise NotImplementedError


def launched(monkeypatch: Any) -> set[str]:
    """Return a set to which each launcher that is called from now on adds its name."""
    names = set[str]()
    check = Contract.check

    def check_and_add(contract: Contract, args: Any) -> None:
        names.add(contract.launcher)
        check(contract, args)

    monkeypatch.setattr(Contract, "check", check_and_add)
    return names


def mapped(argument: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return an argument of a launcher with function(t) in the place of each tensor t."""
    if isinstance(argument, Tensor):
        return function(argument)
    if isinstance(argument, Fp8):
        fields = {field.name: getattr(argument, field.name) for field in dataclasses.fields(Fp8)}
        return Fp8(**{name: mapped(value, function) for name, value in fields.items()})
    if hasattr(argument, "_make"):  # a tuple of operands.py
        return argument._make(mapped(value, function) for value in argument)
    return argument
