"""The contract of a launcher (a function that launches kernels): its outputs, its
inputs, and how their shapes agree.

    @contract("dw[N,K]+ scratch[*] <- dout[R,N] inp[R,K] layer.b[N]?")

Outputs stand left of `<-`, inputs right of it, each side in the order of the signature.  A dot
names a field of an argument: of a tuple of operands.py, or of an Fp8.  A dimension is a symbol,
an integer or a product (`3*C`, `B*T`); `*` alone is any shape.  `?` marks a tensor that may be
None, as every field of None is, `+` an output that may be accumulated into, `~` a tensor with any
stride along its first dimension.

`scratch` is workspace: its contents are meaningless after the call.  `rowsum` is workspace of the
head: classifier_fwd writes it for classifier_loss, in a layout that is private to the two.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from gpt2_triton.operands import Operand

WORKSPACE = ("scratch", "rowsum")  # outputs without a meaning of their own
LAUNCHERS: dict[str, Any] = {}  # every function with a contract, by name; its `contract` is one

Launcher = TypeVar("Launcher", bound=Callable[..., None])

_TENSOR = re.compile(r"([\w.]+)\[([^\]]*)\]([?+~]*)")


class _Tensor(NamedTuple):
    """A tensor that a contract names."""

    name: str  # "dw", or "norm.dw"
    dims: list[str]
    flags: str
    position: int  # of its argument
    fields: list[str]  # below its argument

    def among(self, args: Sequence[Any]) -> Any:
        value = args[self.position] if self.position < len(args) else None
        for field in self.fields:
            value = None if value is None else getattr(value, field)
        return value


class Contract:
    """A launcher's outputs and inputs, parsed from its line."""

    def __init__(self, line: str, launcher: Callable[..., None]):
        self.launcher = launcher.__name__
        arguments = list(inspect.signature(launcher).parameters)

        def tensors(side: str) -> list[_Tensor]:
            found = []
            for name, dims, flags in _TENSOR.findall(side):
                argument, *fields = name.split(".")
                position = arguments.index(argument)
                found.append(_Tensor(name, dims.split(","), flags, position, fields))
            return found

        outputs, _, inputs = line.partition("<-")
        self._outputs = tensors(outputs)
        self._inputs = tensors(inputs)

    def outputs(self, args: Sequence[Any]) -> dict[str, Operand]:
        """Return what a call writes, by name, without what is None."""
        return _present(self._outputs, args)

    def inputs(self, args: Sequence[Any]) -> dict[str, Operand]:
        """Return what a call reads, by name, without what is None."""
        return _present(self._inputs, args)

    def check(self, args: Sequence[Any]) -> None:
        """Bind the plain symbols, then compare all shapes; raise ValueError with launcher
        and tensor on a mismatch.
        """
        every = [(t, t.among(args)) for t in (*self._outputs, *self._inputs)]
        dims: dict[str, int] = {}
        present = [(t, tensor) for t, tensor in every if tensor is not None]
        for t, tensor in present:
            if len(t.dims) == tensor.dim():
                for symbol, size in zip(t.dims, tensor.shape):
                    if symbol.isidentifier():
                        dims.setdefault(symbol, size)
        for t, tensor in present:
            fits = t.dims == ["*"] or (
                len(t.dims) == tensor.dim()
                and all(_product(s, dims) == size for s, size in zip(t.dims, tensor.shape))
            )
            if not fits or not (tensor[:1] if "~" in t.flags else tensor).is_contiguous():
                got = tuple(tensor.shape)
                shape = f"expected contiguous [{','.join(t.dims)}] with {dims}"
                raise ValueError(f"{self.launcher}: {t.name} is {got}, {shape}")
        for t, tensor in every:
            if tensor is None and "?" not in t.flags:
                raise ValueError(f"{self.launcher}: {t.name} is None, expected a tensor")


def contract(line: str) -> Callable[[Launcher], Launcher]:
    """Register a launcher, and check shapes on each call."""

    def wrap(launcher: Launcher) -> Launcher:
        tensors = Contract(line, launcher)

        @functools.wraps(launcher)
        def call(*args: Any, **keywords: Any) -> None:
            tensors.check(args)
            launcher(*args, **keywords)

        call.contract = tensors
        LAUNCHERS[launcher.__name__] = call
        return call

    return wrap


def _product(spec: str, dims: dict[str, int]) -> int:
    return math.prod(int(term) if term.isdigit() else dims[term] for term in spec.split("*"))


def _present(tensors: Sequence[_Tensor], args: Sequence[Any]) -> dict[str, Operand]:
    found = {t.name: t.among(args) for t in tensors}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
