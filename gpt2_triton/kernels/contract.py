"""One line above each launcher says what it writes, what it reads and how the shapes agree.

    @contract("dw[N,K]+ scratch[*] <- dout[R,N] inp[R,K] bias[N]?")

Left of `<-` stand the outputs, right of it the inputs, in the order of the signature.  A dimension is a symbol, an
integer or a product (`3*C`, `B*T`); `*` is scratch of any shape.  `?` marks an argument that may be None, `+` one
that may be accumulated into.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

TRACE: list[tuple[str, tuple, tuple]] | None = (
    None  # a list while a schedule is being recorded: (launcher, outputs, inputs)
)

_ARGUMENT = re.compile(r"(\w+)\[([^\]]*)\]([?+]*)")


def _product(spec: str, dims: dict[str, int]) -> int:
    return math.prod(int(term) if term.isdigit() else dims[term] for term in spec.split("*"))


def _check(launcher: str, arguments: list[tuple[str, str, str]], tensors: tuple) -> None:
    """Bind every plain symbol first, then compare all shapes; a mismatch names the launcher and the argument."""
    dims: dict[str, int] = {}
    present = [
        (name, spec.split(","), tensor) for (name, spec, _), tensor in zip(arguments, tensors) if tensor is not None
    ]
    for _, spec, tensor in present:
        if spec != ["*"] and len(spec) == tensor.dim():
            for symbol, size in zip(spec, tensor.shape):
                if symbol.isidentifier():
                    dims.setdefault(symbol, size)
    for name, spec, tensor in present:
        if spec == ["*"]:
            continue
        fits = len(spec) == tensor.dim() and all(_product(s, dims) == size for s, size in zip(spec, tensor.shape))
        if not fits or not tensor.is_contiguous():
            got = tuple(tensor.shape)
            raise ValueError(f"{launcher}: {name} is {got}, expected contiguous [{','.join(spec)}] with {dims}")
    for (name, _, flags), tensor in zip(arguments, tensors):
        if tensor is None and "?" not in flags:
            raise ValueError(f"{launcher}: {name} is None, expected a tensor")


def contract(line: str) -> Callable:
    """Decorate a launcher with its contract: shapes are checked on every call, and TRACE records it when it is a
    list.
    """
    outs, ins = (_ARGUMENT.findall(side) for side in line.partition("<-")[::2])
    arguments = outs + ins

    def wrap(launcher: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(launcher).parameters)[: len(arguments)]
        assert names == [name for name, _, _ in arguments], f"{launcher.__name__}: contract and signature differ"

        @functools.wraps(launcher)
        def call(*args: Any, **keywords: Any) -> None:
            _check(launcher.__name__, arguments, args)
            if TRACE is not None:
                TRACE.append((launcher.__name__, args[: len(outs)], args[len(outs) : len(arguments)]))
            launcher(*args, **keywords)

        call.outputs = len(outs)
        return call

    return wrap
