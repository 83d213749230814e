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


def in_language(name: str) -> Callable:
    """Decorate a replacement of a function of triton.language; its first
    argument is Triton's function.
    """

    def replace(function: Callable) -> Callable:
        replacement = functools.partial(function, getattr(tl, name))
        setattr(tl, name, replacement)
        return replacement

    return replace


def _is_fp32(*values: Any) -> bool:
    return all(type(value) is core.tensor and value.dtype is core.float32 for value in values)


def _replace_unary(name: str) -> None:
    numpy = getattr(np, name)

    @in_language(name)
    def unary(triton: Callable, x: Any) -> tl.tensor:
        if not _is_fp32(x):
            return triton(x)
        data = numpy(x.handle.data)
        return block(data, core.float32) if is_block(x) else scalar(data, core.float32)

    setattr(tl.math, name, unary)  # tl.sigmoid looks there


def _replace_extremum(name: str) -> None:
    """Replace tl.minimum or tl.maximum; NaN and Triton's version decide numpy's function."""
    builder = interpreter.interpreter_builder
    of_numbers, of_all = (
        getattr(builder, f"create_{name[:3]}numf"),
        getattr(builder, f"create_{name}f"),
    )

    @in_language(name)
    def extremum(
        triton: Callable, x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE
    ) -> tl.tensor:
        if not _is_fp32(x, y) or not (is_block(x) or is_block(y)):
            return triton(x, y, propagate_nan=propagate_nan)
        function = of_all if plain(propagate_nan) == tl.PropagateNan.ALL else of_numbers
        return block(function(x.handle, y.handle).data, core.float32)


def _replace_reduction(name: str, numpy: Callable) -> None:
    @in_language(name)
    def reduce(
        triton: Callable, input: tl.tensor, axis: Any = None, *args: Any, **options: Any
    ) -> tl.tensor:
        axis, dtype = plain(axis), NUMBERS.get(input.dtype.name)
        if args or options or dtype is None or axis is None or len(input.shape) < 2:
            return triton(input, axis, *args, **options)
        return block(numpy(input.handle.data, axis=axis).astype(dtype, copy=False), input.dtype)


def replace() -> None:
    for name in UNARY:
        _replace_unary(name)
    for name in ("minimum", "maximum"):
        _replace_extremum(name)
    _replace_reduction("sum", np.sum)
    _replace_reduction("max", np.nanmax)
    tl.reshape, tl.permute = core.tensor.reshape, core.tensor.permute
    semantic, tensor = interpreter.interpreter_semantic, core.tensor
    to_tensor_by_triton = semantic.to_tensor

    def to_tensor(x: Any, check_type: bool = True) -> Any:
        if type(x) is tensor:
            return x
        return whole(x) if type(x) is int and x in INT32 else to_tensor_by_triton(x, check_type)

    semantic.to_tensor = to_tensor

    @in_language("arange")
    def arange(triton: Callable, start: Any, end: Any) -> tl.tensor:
        first = plain(start)
        size = plain(end) - first
        return lazy(Affine(first, (1 if size > 1 else 0,), (size,), core.int32))

    @in_language("full")
    def full(triton: Callable, shape: Any, value: Any, dtype: Any) -> tl.tensor:
        value, dtype = plain(value), plain(dtype)
        sizes = [plain(n) for n in shape]
        if type(value) in (int, float) and dtype.name in NUMBERS and sizes:
            return block(np.full(sizes, value, NUMBERS[dtype.name]), dtype)
        return triton(shape, value, dtype)

    @in_language("zeros")
    def zeros(triton: Callable, shape: Any, dtype: Any) -> tl.tensor:
        return tl.full(shape, 0, dtype)

    @in_language("zeros_like")
    def zeros_like(triton: Callable, input: tl.tensor) -> tl.tensor:
        return tl.full(input.type.shape, 0, input.dtype)

    @in_language("program_id")
    def program_id(triton: Callable, axis: Any) -> tl.tensor:
        return whole(interpreter.interpreter_builder.grid_idx[plain(axis)])

    @in_language("split")
    def split(triton: Callable, x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        data = x.handle.data
        return (
            (block(data[..., 0], x.dtype), block(data[..., 1], x.dtype))
            if data.ndim > 1
            else triton(x)
        )

    @in_language("where")
    def where(triton: Callable, condition: Any, x: Any, y: Any) -> tl.tensor:
        x, y = plain(x), plain(y)
        if (
            type(x) is type(y) is type(condition) is core.tensor
            and condition.dtype is core.int1
            and x.dtype is y.dtype
        ):
            if not (is_block(x) or is_block(y) or is_block(condition)):
                return x if condition.handle.data.item() else y
        dtype = NUMBERS.get(x.dtype.name) if is_block(x) else None
        if dtype is None or type(condition) is not core.tensor or condition.dtype is not core.int1:
            return triton(condition, x, y)
        if type(y) is core.tensor:
            other = y.handle.data if y.dtype is x.dtype else None
        else:
            other = number(y, dtype)
        if other is None:
            return triton(condition, x, y)
        mask, data = condition.handle, x.handle.data
        if type(mask) is Box and mask.is_full and mask.sizes == data.shape and other.size == 1:
            return x
        return block(np.where(mask.data, data, other), x.dtype)

    @in_language("dot")
    def dot(triton: Callable, input: Any, other: Any, acc: Any = None, **options: Any) -> tl.tensor:
        if not _is_fp32(input, other) or not (acc is None or _is_fp32(acc)):
            return triton(input, other, acc, **options)
        data = np.matmul(input.handle.data, other.handle.data)
        data += np.float32(0) if acc is None else acc.handle.data
        return block(data, core.float32)
