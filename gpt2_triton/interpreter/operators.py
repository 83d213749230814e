"""Operators of blocks and scalars of equal types, and of one and a Python number."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime.interpreter import TensorHandle

from gpt2_triton.interpreter.blocks import (
    INT32,
    INTEGERS,
    Affine,
    Box,
    block,
    integer,
    is_block,
    lazy,
    plain,
    scalar,
    whole,
)

FLOATS: dict[str, np.dtype] = {"fp32": np.dtype(np.float32)}
WORDS = INTEGERS | {"uint32": np.dtype(np.uint32)}
NUMBERS = WORDS | FLOATS
BITS = WORDS | {"int1": np.dtype(bool)}
WHOLE = slice(None)

Lazy = Callable[[Any, Any], Affine | Box | None]  # of an Affine or Box and another, or an int


def number(value: Any, dtype: np.dtype) -> Any:
    """Return a Python number in the type of the tensor beside it; None if
    Triton decides otherwise.
    """
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


def _operands(
    self: tl.tensor, other: Any, types: dict[str, np.dtype]
) -> tuple[Any, Any, tl.dtype, bool] | None:
    """Return both sides of an operator for `types`, a handle or a Python number; the type of
    their result; and whether it is a block.  None where Triton has to convert them.
    """
    dtype = self.dtype
    known = types.get(dtype.name)
    if known is None:
        return None
    shaped = type(self.type) is core.block_type
    if type(other) is not core.tensor:
        return None if number(other, known) is None else (self.handle, other, dtype, shaped)
    right = other.handle
    shaped = shaped or type(other.type) is core.block_type
    if other.dtype is dtype:
        return self.handle, right, dtype, shaped
    if dtype.name in INTEGERS and other.dtype.name in INTEGERS:
        return self.handle, right, core.int64, shaped
    if dtype is core.float32 and other.dtype is core.int32:
        return self.handle, TensorHandle(right.data.astype(known), dtype), dtype, shaped
    return None


def _binary(
    name: str, function: Callable, types: dict[str, np.dtype], returns: tl.dtype | None = None,
    of_integers: Callable | None = None, without_data: Lazy | None = None, swap: bool = False,
) -> None:  # fmt: skip
    """Replace an operator of core.tensor by numpy's function, and by Python's for integers."""
    triton = getattr(core.tensor, name)

    def operate(self: tl.tensor, other: Any) -> tl.tensor:
        other = plain(other)
        if of_integers and self.dtype is core.int32:  # the most frequent case first
            left = _integer(self)
            right = other if type(other) is int else _integer(other)
            if left is not None and right is not None:
                found = of_integers(right, left) if swap else of_integers(left, right)
                if type(found) is int and found in INT32:
                    return whole(found)
        operands = _operands(self, other, types)
        if operands is None:
            return triton(self, other)
        left, right, dtype, shaped = operands
        lazily = without_data if shaped else of_integers
        if lazily and (type(left) in (Affine, Box) or type(right) in (Affine, Box)):
            terms = [_term(left), _term(right)]
            if None not in terms:
                found = _lazy_result(lazily(*reversed(terms) if swap else terms), dtype, returns)
                if found is not None:
                    return found
        first = left.data
        second = right.data if isinstance(right, TensorHandle) else number(right, types[dtype.name])
        data = function(second, first) if swap else function(first, second)
        return block(data, returns or dtype) if shaped else scalar(data, returns or dtype)

    setattr(core.tensor, name, operate)


def _integer(operand: Any) -> int | None:
    """Return the value of an int32 scalar without data."""
    if (
        type(operand) is core.tensor
        and operand.type is core.int32
        and type(operand.handle) is Affine
    ):
        return operand.handle.start
    return None


def _lazy_result(found: Any, dtype: tl.dtype, returns: tl.dtype | None) -> tl.tensor | None:
    """Return a result without data; None if there is none, or if integers would wrap around."""
    if type(found) is bool:
        return scalar(np.array([found]), core.int1)
    if type(found) is int:
        return whole(found, dtype) if dtype is core.int64 or found in INT32 else None
    if found is None:
        return None
    found.dtype = returns or dtype
    return lazy(found) if type(found) is Box or found.fits() else None


def _term(operand: Any) -> Any:
    """Return an Affine or Box as it is, a single integer as an int, and None for anything else."""
    if type(operand) in (int, Box):
        return operand
    if type(operand) is Affine:
        return operand if operand.sizes else operand.start
    if type(operand) is TensorHandle and operand.data.size == 1 and operand.data.dtype.kind == "i":
        return int(operand.data.item())
    return None


def _sum(left: Any, right: Any) -> Affine | None:
    if type(left) is int:
        return right.scaled(1, left)
    return left.scaled(1, right) if type(right) is int else left.plus(right)


def _difference(left: Any, right: Any) -> Affine | None:
    return left.scaled(1, -right) if type(right) is int else None


def _product(left: Any, right: Any) -> Affine | None:
    if type(left) is int:
        return right.scaled(left)
    return left.scaled(right) if type(right) is int else None


def _below(left: Any, right: Any) -> Box | None:
    return left.below(right) if type(left) is Affine and type(right) is int else None


def _both(left: Any, right: Any) -> Box | None:
    return left.both(right) if type(left) is type(right) is Box else None


def _divide(left: Any, right: Any) -> np.ndarray:
    """Return the quotient, rounded towards 0."""
    return (left - np.fmod(left, right)) // right


def _quotient(left: int, right: int) -> int | None:
    if right == 0:
        return None
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _rest(left: int, right: int) -> int | None:
    quotient = _quotient(left, right)
    return None if quotient is None else left - right * quotient


def _replace_add() -> None:
    """Let + move pointers, too."""
    add_numbers = core.tensor.__add__

    def add(self: tl.tensor, other: Any) -> tl.tensor:
        if not self.dtype.is_ptr():
            return add_numbers(self, other)
        other = plain(other)
        offset = (
            other.handle if type(other) is core.tensor and other.dtype.name in INTEGERS else None
        )
        if type(other) is int:
            offset = Affine(other, (), (), core.int64)
        if offset is None:
            return add_numbers(self, other)
        size = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
        if type(offset) is Affine and type(self.handle) is Affine:
            found = self.handle.plus(offset.scaled(size))
            if found is not None:
                return lazy(found)
        data = self.handle.data + (offset.data.astype(np.int64) * size).view(np.uint64)
        return (
            block(data, self.dtype)
            if is_block(self) or is_block(other)
            else scalar(data, self.dtype)
        )

    core.tensor.__add__ = add


def _indexing(by_triton: Callable) -> Callable:
    def index(self: tl.tensor, at: Any) -> tl.tensor:
        is_tuple = type(at) is tuple
        if not is_tuple or not is_block(self) or any(i is not None and i != WHOLE for i in at):
            return by_triton(self, at)
        if type(self.handle) in (Affine, Box) and at.count(WHOLE) == len(self.handle.sizes):
            return lazy(self.handle.expanded(at))
        return block(self.handle.data[at], self.dtype)

    return index


def _conversion(by_triton: Callable) -> Callable:
    def to(self: tl.tensor, dtype: Any, rounding: Any = None, bitcast: Any = False) -> tl.tensor:
        dtype = plain(dtype)
        if plain(rounding) is not None or plain(bitcast):
            return by_triton(self, dtype, rounding, bitcast)
        if dtype is self.dtype:
            return self
        if type(self.handle) is Affine and dtype is core.int64:
            return lazy(self.handle.cast(dtype))
        data = cast(self.handle.data, self.dtype.name, dtype.name)
        if data is None:
            return by_triton(self, dtype, rounding, bitcast)
        return block(data, dtype) if is_block(self) else scalar(data, dtype)

    return to


def _numbers(words: tuple[Any, ...]) -> list[int]:
    """Return the numbers of f(1, 2) or f((1, 2))."""
    each = words if isinstance(words[0], int | core.constexpr) else words[0]
    return [plain(n) for n in each]


def _reshape(self: tl.tensor, *shape: Any, can_reorder: Any = False) -> tl.tensor:
    return block(self.handle.data.reshape(_numbers(shape)), self.dtype)


def _permute(self: tl.tensor, *axes: Any) -> tl.tensor:
    return block(self.handle.data.transpose(_numbers(axes)), self.dtype)


def replace() -> None:
    for side, swap in (("", False), ("r", True)):
        _binary(f"__{side}add__", np.add, NUMBERS, None, operator.add, _sum, swap)
        _binary(
            f"__{side}sub__",
            np.subtract,
            NUMBERS,
            None,
            operator.sub,
            None if swap else _difference,
            swap,
        )
        _binary(f"__{side}mul__", np.multiply, NUMBERS, None, operator.mul, _product, swap)
        _binary(f"__{side}truediv__", np.divide, FLOATS, swap=swap)
        _binary(f"__{side}floordiv__", _divide, INTEGERS, None, _quotient, swap=swap)
        _binary(f"__{side}mod__", np.fmod, INTEGERS, None, _rest, swap=swap)
    _binary("__lt__", np.less, NUMBERS, core.int1, operator.lt, _below)
    _binary("__le__", np.less_equal, NUMBERS, core.int1, operator.le)
    _binary("__gt__", np.greater, NUMBERS, core.int1, operator.gt)
    _binary("__ge__", np.greater_equal, NUMBERS, core.int1, operator.ge)
    _binary("__eq__", np.equal, NUMBERS, core.int1, operator.eq)
    _binary("__ne__", np.not_equal, NUMBERS, core.int1, operator.ne)
    _binary("__and__", np.bitwise_and, BITS, None, operator.and_, _both)
    _binary("__or__", np.bitwise_or, BITS, None, operator.or_)
    _binary("__xor__", np.bitwise_xor, BITS)
    _binary("__lshift__", np.left_shift, WORDS)
    _binary("__rshift__", np.right_shift, WORDS)
    _replace_add()
    core.tensor.__getitem__ = _indexing(core.tensor.__getitem__)
    core.tensor.to = _conversion(core.tensor.to)
    core.tensor.reshape = _reshape
    core.tensor.permute = _permute
    core.tensor.__index__ = integer
