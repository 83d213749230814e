"""Functions of triton.language, for blocks of the usual types."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from gpt2_triton.interpreter.blocks import (
    INT32,
    Affine,
    Box,
    block,
    is_block,
    lazy,
    plain,
    scalar,
    whole,
)
from gpt2_triton.interpreter.operators import NUMBERS, number

UNARY = ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "floor")


def in_language(name: str, function: Callable) -> None:
    """Replace a function of triton.language by one whose first argument is Triton's."""
    setattr(tl, name, functools.partial(function, getattr(tl, name)))


def _is_fp32(*values: Any) -> bool:
    return all(type(value) is core.tensor and value.dtype is core.float32 for value in values)


def _unary(name: str) -> Callable:
    numpy = getattr(np, name)

    def unary(triton: Callable, x: Any) -> tl.tensor:
        if not _is_fp32(x):
            return triton(x)
        data = numpy(x.handle.data)
        return block(data, core.float32) if is_block(x) else scalar(data, core.float32)

    return unary


def _extremum(of_numbers: Callable, of_all: Callable) -> Callable:
    """Return a minimum or maximum; NaN and Triton's version decide numpy's function."""

    def extremum(
        triton: Callable, x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE
    ) -> tl.tensor:
        if not _is_fp32(x, y) or not (is_block(x) or is_block(y)):
            return triton(x, y, propagate_nan=propagate_nan)
        function = of_all if plain(propagate_nan) == tl.PropagateNan.ALL else of_numbers
        return block(function(x.handle, y.handle).data, core.float32)

    return extremum


def _reduction(numpy: Callable) -> Callable:
    def reduce(
        triton: Callable, input: tl.tensor, axis: Any = None, *args: Any, **options: Any
    ) -> tl.tensor:
        axis = plain(axis)
        dtype = NUMBERS.get(input.dtype.name)
        if args or options or dtype is None or axis is None or len(input.shape) < 2:
            return triton(input, axis, *args, **options)
        return block(numpy(input.handle.data, axis=axis).astype(dtype, copy=False), input.dtype)

    return reduce


def _arange(triton: Callable, start: Any, end: Any) -> tl.tensor:
    first = plain(start)
    size = plain(end) - first
    return lazy(Affine(first, (1 if size > 1 else 0,), (size,), core.int32))


def _full(triton: Callable, shape: Any, value: Any, dtype: Any) -> tl.tensor:
    value = plain(value)
    dtype = plain(dtype)
    sizes = [plain(n) for n in shape]
    if type(value) in (int, float) and dtype.name in NUMBERS and sizes:
        return block(np.full(sizes, value, NUMBERS[dtype.name]), dtype)
    return triton(shape, value, dtype)


def _zeros(triton: Callable, shape: Any, dtype: Any) -> tl.tensor:
    return tl.full(shape, 0, dtype)


def _zeros_like(triton: Callable, input: tl.tensor) -> tl.tensor:
    return tl.full(input.type.shape, 0, input.dtype)


def _program_id(triton: Callable, axis: Any) -> tl.tensor:
    return whole(interpreter.interpreter_builder.grid_idx[plain(axis)])


def _split(triton: Callable, x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    data = x.handle.data
    if data.ndim == 1:
        return triton(x)
    return block(data[..., 0], x.dtype), block(data[..., 1], x.dtype)


def _where(triton: Callable, condition: Any, x: Any, y: Any) -> tl.tensor:
    x = plain(x)
    y = plain(y)
    is_mask = type(condition) is core.tensor and condition.dtype is core.int1
    if not is_mask or type(x) is not core.tensor:
        return triton(condition, x, y)
    alike = type(y) is core.tensor and y.dtype is x.dtype
    if alike and not (is_block(x) or is_block(y) or is_block(condition)):
        return x if condition.handle.data.item() else y
    dtype = NUMBERS.get(x.dtype.name) if is_block(x) else None
    if dtype is None:
        return triton(condition, x, y)
    other = y.handle.data if alike else number(y, dtype)
    if other is None:
        return triton(condition, x, y)
    mask = condition.handle
    data = x.handle.data
    if type(mask) is Box and mask.is_full and mask.sizes == data.shape and other.size == 1:
        return x
    return block(np.where(mask.data, data, other), x.dtype)


def _dot(triton: Callable, input: Any, other: Any, acc: Any = None, **options: Any) -> tl.tensor:
    if not _is_fp32(input, other) or not (acc is None or _is_fp32(acc)):
        return triton(input, other, acc, **options)
    data = np.matmul(input.handle.data, other.handle.data)
    data += np.float32(0) if acc is None else acc.handle.data
    return block(data, core.float32)


def _to_tensor(triton: Callable, x: Any, check_type: bool = True) -> Any:
    if type(x) is core.tensor:
        return x
    return whole(x) if type(x) is int and x in INT32 else triton(x, check_type)


def replace() -> None:
    for name in UNARY:
        in_language(name, _unary(name))
        setattr(tl.math, name, getattr(tl, name))  # tl.sigmoid looks there
    builder = interpreter.interpreter_builder
    in_language("minimum", _extremum(builder.create_minnumf, builder.create_minimumf))
    in_language("maximum", _extremum(builder.create_maxnumf, builder.create_maximumf))
    in_language("sum", _reduction(np.sum))
    in_language("max", _reduction(np.nanmax))
    for function in (_arange, _full, _zeros, _zeros_like, _program_id, _split, _where, _dot):
        in_language(function.__name__.lstrip("_"), function)
    tl.reshape = core.tensor.reshape
    tl.permute = core.tensor.permute
    semantic = interpreter.interpreter_semantic
    semantic.to_tensor = functools.partial(_to_tensor, semantic.to_tensor)
