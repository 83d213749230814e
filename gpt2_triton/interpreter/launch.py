"""Launches: arguments as a kernel sees them, and its programs one after another."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2_triton.interpreter.blocks import INT32, whole

MOST_DESCRIPTORS = 10_000


def _patch_language_once() -> None:
    """Patch triton.language once; Triton patches and restores 200 functions a launch."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    # all that Triton looks for
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    patched = SimpleNamespace(restore=lambda: None)

    def patch_lang(fn: Any) -> Any:
        return patched

    interpreter._patch_lang = patch_lang


def converter(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return Triton's conversion of an argument, which makes a descriptor once: the
    arena's are those of every step.
    """
    descriptors = dict[Any, Any]()
    pointers = functools.cache(lambda dtype: convert(torch.empty(0, dtype=dtype)).type)

    def converted(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return whole(argument.data_ptr(), pointers(argument.dtype))
        if type(argument) is int and argument in INT32:
            return whole(argument)
        if not isinstance(argument, TensorDescriptor):
            return convert(argument)
        base, sizes = argument.base, (*argument.shape, *argument.strides, *argument.block_shape)
        key = base.data_ptr(), base.dtype, sizes, argument.padding
        found = descriptors.get(key)
        if found is None:
            if len(descriptors) == MOST_DESCRIPTORS:
                descriptors.clear()
            found = descriptors[key] = convert(argument)
        return found

    return converted


class _Kernel(NamedTuple):
    """What is the same in all launches of a kernel."""

    function: Callable
    signature: inspect.Signature
    constants: frozenset[str]  # names of the arguments that a kernel takes as they are


def replace() -> None:
    """Replace the launch of a kernel, which would copy its tensors, and the
    call of a device function.
    """
    _patch_language_once()
    converted = converter(interpreter._implicit_cvt)
    kernels = dict[Any, _Kernel]()
    builder, rewritten = interpreter.interpreter_builder, InterpretedFunction.rewritten_fn

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        if warmup:
            return
        kernel = kernels.get(self.fn)
        if kernel is None:
            executor = GridExecutor(self.rewrite(), self.arg_names, grid)
            names = frozenset(executor.constexprs)
            kernel = kernels[self.fn] = _Kernel(executor.fn, inspect.signature(executor.fn), names)
        parameters = kernel.signature.parameters.keys()
        given = kernel.signature.bind(
            *args, **{key: keywords[key] for key in keywords.keys() & parameters}
        )
        given.apply_defaults()
        arguments = {
            key: x if key in kernel.constants else converted(x)
            for key, x in given.arguments.items()
        }
        sizes = ((*grid(arguments),) if callable(grid) else (*grid,)) + (1, 1)
        builder.set_grid_dim(*sizes[:3])
        try:
            for at in np.ndindex(sizes[:3]):
                builder.set_grid_idx(*at)
                kernel.function(**arguments)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        function = rewritten.get(self.fn) or self.rewrite()
        return function(*args, **keywords)

    InterpretedFunction.run, InterpretedFunction.__call__ = run, call
