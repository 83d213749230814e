"""Launches: arguments as a kernel sees them, and its programs one after another."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2_triton.interpreter.blocks import INT32, scalar

MOST_DESCRIPTORS = 10_000


def _patch_language_once() -> None:
    """Patch triton.language: Triton patches 200 functions for each launch and device function, and restores them."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))  # all that Triton looks for
    patched = SimpleNamespace(restore=lambda: None)

    def patch_lang(fn: Any) -> Any:
        return patched

    interpreter._patch_lang = patch_lang


def _converter(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return Triton's conversion of an argument, which makes a descriptor once: the arena's are those of every step."""
    descriptors = dict[Any, Any]()
    pointers = functools.cache(lambda dtype: convert(torch.empty(0, dtype=dtype)).type)

    def converted(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return scalar(np.array([argument.data_ptr()], np.uint64), pointers(argument.dtype))
        if type(argument) is int and argument in INT32:
            return scalar(np.array([argument], np.int32), core.int32)
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


def replace() -> None:
    """Replace the launch of a kernel, which would copy its tensors, and the call of a device function."""
    _patch_language_once()
    converted, signature = _converter(interpreter._implicit_cvt), functools.cache(inspect.signature)
    builder, rewritten = interpreter.interpreter_builder, InterpretedFunction.rewritten_fn

    def launch(self: Any, *args: Any, **keywords: Any) -> None:
        known = signature(self.fn)
        given = known.bind(*args, **{key: keywords[key] for key in keywords.keys() & known.parameters.keys()})
        given.apply_defaults()
        constants = self.constexprs
        arguments = {key: x if key in constants else converted(x) for key, x in given.arguments.items()}
        grid = self.grid(arguments) if callable(self.grid) else self.grid
        sizes = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*sizes)
        try:
            for at in np.ndindex(sizes):
                builder.set_grid_idx(*at)
                self.fn(**arguments)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        function = rewritten.get(self.fn) or self.rewrite()
        return function(*args, **keywords)

    GridExecutor.__call__, InterpretedFunction.__call__ = launch, call
