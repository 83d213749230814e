"""Operators of blocks and scalars of equal types, and of one and a Python number."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime.interpreter import TensorHandle

from gpt2_triton.interpreter.blocks import INTEGERS, Affine, Box, block, is_block, lazy, plain, scalar

FLOATS: dict[str, np.dtype] = {"fp32": np.dtype(np.float32)}
WORDS = INTEGERS | {"uint32": np.dtype(np.uint32)}
NUMBERS = WORDS | FLOATS
BITS = WORDS | {"int1": np.dtype(bool)}
WHOLE = slice(None)

Lazy = Callable[[Any, Any], Affine | Box | None]  # of an Affine or Box and another, or an int


def number(value: Any, dtype: np.dtype) -> Any:
    """Return a Python number in the type of the tensor beside it; None if Triton decides otherwise."""
    if type(value) is int:
        return dtype.type(value) if dtype.kind != "u" or value >= 0 else None
    return dtype.type(value) if type(value) is float and dtype.kind == "f" else None


def cast(data: np.ndarray, old: str, new: str) -> np.ndarray | None:
    """Return the data of one type in another; None for types that are left to Triton.

    fp32 is truncated to bf16, with Triton's bits but for subnormals.
    """
    if old in NUMBERS | BITS and new in NUMBERS:
        return data.astype(NUMBERS[new])
    if (old, new) == ("bf16", "fp32"):
        return (data.astype(np.uint32) << 16).view(np.float32)
    if (old, new) == ("fp32", "bf16"):
        return (data.view(np.uint32) >> 16).astype(np.uint16)
    return None


def _binary(
    name: str, function: Callable, types: dict[str, np.dtype], returns: tl.dtype | None = None,
    without_data: Lazy | None = None, swap: bool = False,
) -> None:  # fmt: skip
    """Replace an operator of core.tensor by a function of numpy, for tensors of `types`."""
    triton, tensor, block_type = getattr(core.tensor, name), core.tensor, core.block_type

    def operator(self: tl.tensor, other: Any) -> tl.tensor:
        dtype, other = self.dtype, plain(other)
        known = types.get(dtype.name)
        if known is None:
            return triton(self, other)
        left, shaped = self.handle, type(self.type) is block_type
        if type(other) is tensor:
            right = other.handle
            if other.dtype is not dtype:
                if dtype.name not in INTEGERS or other.dtype.name not in INTEGERS:
                    if dtype is not core.float32 or other.dtype is not core.int32:
                        return triton(self, other)
                    right = TensorHandle(right.data.astype(known), dtype)
                else:
                    dtype = core.int64
            shaped = shaped or type(other.type) is block_type
        else:
            right = number(other, known)
            if right is None:
                return triton(self, other)
        if without_data and (type(left) in (Affine, Box) or type(right) in (Affine, Box)):
            found = without_data(_term(left), _term(right))
            if found is not None:
                found.dtype = returns or dtype
                if type(found) is Box or found.fits():
                    return lazy(found)
        first, second = left.data, right.data if isinstance(right, TensorHandle) else right
        data = function(second, first) if swap else function(first, second)
        return block(data, returns or dtype) if shaped else scalar(data, returns or dtype)

    setattr(tensor, name, operator)


def _term(operand: Any) -> Any:
    """Return an Affine or Box as it is, a single integer as an int, and None for anything else."""
    if type(operand) in (Affine, Box):
        return operand
    data = operand.data if isinstance(operand, TensorHandle) else operand
    return int(data.item()) if data.size == 1 and data.dtype.kind == "i" else None


def _sum(left: Any, right: Any) -> Affine | None:
    if type(left) is int:
        return right.scaled(1, left)
    if type(right) is int:
        return left.scaled(1, right)
    return left.plus(right) if type(left) is type(right) is Affine else None


def _difference(left: Any, right: Any) -> Affine | None:
    return left.scaled(1, -right) if type(left) is Affine and type(right) is int else None


def _product(left: Any, right: Any) -> Affine | None:
    if type(left) is int:
        return right.scaled(left)
    return left.scaled(right) if type(right) is int else None


def _below(left: Any, right: Any) -> Box | None:
    return left.below(right) if type(left) is Affine and type(right) is int else None


def _both(left: Any, right: Any) -> Box | None:
    return left.both(right) if type(left) is type(right) is Box else None


def _floor_divide(left: Any, right: Any) -> np.ndarray:
    return (left - np.fmod(left, right)) // right


def _replace_add() -> None:
    """Let + move pointers, too."""
    add_numbers = core.tensor.__add__

    def add(self: tl.tensor, other: Any) -> tl.tensor:
        if not self.dtype.is_ptr():
            return add_numbers(self, other)
        offset = other.handle if type(other) is core.tensor and other.dtype.name in INTEGERS else None
        if offset is None:
            return add_numbers(self, other)
        size = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
        if type(offset) is Affine or type(self.handle) is Affine:
            left, right = _term(self.handle), _term(offset)
            left = int(self.handle.data.item()) if left is None and self.handle.data.size == 1 else left
            if left is not None and right is not None:
                found = _sum(left, right * size if type(right) is int else right.scaled(size))
                if found is not None:
                    return lazy(found.cast(self.dtype))
        data = self.handle.data + (offset.data.astype(np.int64) * size).view(np.uint64)
        return block(data, self.dtype) if is_block(self) or is_block(other) else scalar(data, self.dtype)

    core.tensor.__add__ = add


def replace() -> None:
    """Replace the operators and methods of core.tensor."""
    for side, swap in (("", False), ("r", True)):
        _binary(f"__{side}add__", np.add, NUMBERS, None, _sum, swap)
        _binary(f"__{side}sub__", np.subtract, NUMBERS, None, None if swap else _difference, swap)
        _binary(f"__{side}mul__", np.multiply, NUMBERS, None, _product, swap)
        _binary(f"__{side}truediv__", np.divide, FLOATS, swap=swap)
        _binary(f"__{side}floordiv__", _floor_divide, INTEGERS, swap=swap)
        _binary(f"__{side}mod__", np.fmod, INTEGERS, swap=swap)
    _binary("__lt__", np.less, NUMBERS, core.int1, _below)
    _binary("__le__", np.less_equal, NUMBERS, core.int1)
    _binary("__gt__", np.greater, NUMBERS, core.int1)
    _binary("__ge__", np.greater_equal, NUMBERS, core.int1)
    _binary("__eq__", np.equal, NUMBERS, core.int1)
    _binary("__ne__", np.not_equal, NUMBERS, core.int1)
    _binary("__and__", np.bitwise_and, BITS, None, _both)
    _binary("__or__", np.bitwise_or, BITS)
    _binary("__xor__", np.bitwise_xor, BITS)
    _binary("__lshift__", np.left_shift, WORDS)
    _binary("__rshift__", np.right_shift, WORDS)
    _replace_add()
    index_by_triton, to_by_triton = core.tensor.__getitem__, core.tensor.to

    def index(self: tl.tensor, at: Any) -> tl.tensor:
        if type(at) is not tuple or not is_block(self) or any(i is not None and i != WHOLE for i in at):
            return index_by_triton(self, at)
        if type(self.handle) in (Affine, Box) and at.count(WHOLE) == len(self.handle.sizes):
            return lazy(self.handle.expanded(at))
        return block(self.handle.data[at], self.dtype)

    def to(self: tl.tensor, dtype: Any, rounding: Any = None, bitcast: Any = False) -> tl.tensor:
        dtype = plain(dtype)
        if plain(rounding) is not None or plain(bitcast):
            return to_by_triton(self, dtype, rounding, bitcast)
        if dtype is self.dtype:
            return self
        if type(self.handle) is Affine and dtype is core.int64:
            return lazy(self.handle.cast(dtype))
        data = cast(self.handle.data, self.dtype.name, dtype.name)
        if data is None:
            return to_by_triton(self, dtype, rounding, bitcast)
        return block(data, dtype) if is_block(self) else scalar(data, dtype)

    def reshape(self: tl.tensor, *shape: Any, can_reorder: Any = False) -> tl.tensor:
        sizes = shape if isinstance(shape[0], int | core.constexpr) else shape[0]
        return block(self.handle.data.reshape([plain(n) for n in sizes]), self.dtype)

    core.tensor.__getitem__, core.tensor.to, core.tensor.reshape = index, to, reshape
