"""The contract of a launcher (a function that launches kernels): its outputs, its
inputs, and how their shapes agree.

    @contract("dw[N,K]+ scratch[*] <- dout[R,N] inp[R,K] bias[N]?")

Outputs stand left of `<-`, inputs right of it, in the order of the signature.  A dimension is
a symbol, an integer or a product (`3*C`, `B*T`); `*` alone is any shape.  `?` marks an
argument that may be None, `+` an output that may be accumulated into, `~` an argument with any
stride along its first dimension.

`scratch` is workspace: its contents are meaningless after the call.  `rowsum` is workspace of the
head: classifier_fwd writes it for classifier_loss, in a layout that is private to the two.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

WORKSPACE = ("scratch", "rowsum")  # outputs without a meaning of their own
LAUNCHERS: dict[str, Callable[..., None]] = {}  # every function with a contract, by name
# a list while launches are recorded: (launcher, outputs, inputs)
TRACE: list[tuple[str, tuple, tuple]] | None = None

_ARGUMENT = re.compile(r"(\w+)\[([^\]]*)\]([?+~]*)")


def _product(spec: str, dims: dict[str, int]) -> int:
    return math.prod(int(term) if term.isdigit() else dims[term] for term in spec.split("*"))


def _check(launcher: str, arguments: list[tuple[str, str, str]], tensors: tuple) -> None:
    """Bind the plain symbols, then compare all shapes; raise ValueError with launcher
    and argument on a mismatch.
    """
    dims: dict[str, int] = {}
    pairs = zip(arguments, tensors)
    present = [
        (name, spec.split(","), flags, t) for (name, spec, flags), t in pairs if t is not None
    ]
    for _, spec, _, tensor in present:
        if spec != ["*"] and len(spec) == tensor.dim():
            for symbol, size in zip(spec, tensor.shape):
                if symbol.isidentifier():
                    dims.setdefault(symbol, size)
    for name, spec, flags, tensor in present:
        fits = spec == ["*"] or (
            len(spec) == tensor.dim()
            and all(_product(s, dims) == size for s, size in zip(spec, tensor.shape))
        )
        if not fits or not (tensor[:1] if "~" in flags else tensor).is_contiguous():
            got = tuple(tensor.shape)
            raise ValueError(
                f"{launcher}: {name} is {got}, expected contiguous [{','.join(spec)}] with {dims}"
            )
    for (name, _, flags), tensor in zip(arguments, tensors):
        if tensor is None and "?" not in flags:
            raise ValueError(f"{launcher}: {name} is None, expected a tensor")


def contract(line: str) -> Callable:
    """Register a launcher, check shapes on each call, and record calls while TRACE is a list."""
    outs, ins = (_ARGUMENT.findall(side) for side in line.partition("<-")[::2])
    arguments = outs + ins

    def wrap(launcher: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(launcher).parameters)[: len(arguments)]
        assert names == [name for name, _, _ in arguments], (
            f"{launcher.__name__}: contract and signature differ"
        )

        @functools.wraps(launcher)
        def call(*args: Any, **keywords: Any) -> None:
            _check(launcher.__name__, arguments, args)
            if TRACE is not None:
                TRACE.append(
                    (launcher.__name__, args[: len(outs)], args[len(outs) : len(arguments)])
                )
            launcher(*args, **keywords)

        call.outputs = len(outs)
        LAUNCHERS[launcher.__name__] = call
        return call

    return wrap
