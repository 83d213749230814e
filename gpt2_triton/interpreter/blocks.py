"""Blocks: their types, made once for each shape, and blocks whose elements follow from a few numbers.

An address of an element is most often start + row * step + column.  Such a block of integers or pointers is an Affine,
and a mask that compares one with a bound is a Box.  A load through both copies a rectangle of the memory.  Whoever
reads their `data` gets the array, made then.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

UINT64 = np.dtype(np.uint64)
INTEGERS: dict[str, np.dtype] = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
INT32 = range(-(2**31), 2**31)

_types: dict[tuple[str, tuple[int, ...]], Any] = {}


class Affine(TensorHandle):
    """Integers or addresses: start + step * index, summed over the axes; an axis of size 1 has step 0."""

    def __init__(self, start: int, steps: Sequence[int], sizes: Sequence[int], dtype: tl.dtype):
        self.start, self.dtype = start, dtype
        self.steps, self.sizes = tuple(steps), tuple(sizes)
        self.attr = dict[str, Any]()

    @functools.cached_property
    def data(self) -> np.ndarray:
        total = np.full((1,) * len(self.sizes), self.start, np.int64)
        for axis, (step, size) in enumerate(zip(self.steps, self.sizes)):
            shape = [1] * len(self.sizes)
            shape[axis] = size
            total = total + (np.arange(size) * step).reshape(shape)
        return total.view(UINT64) if self.dtype.is_ptr() else total.astype(INTEGERS[self.dtype.name])

    def cast(self, dtype: tl.dtype) -> "Affine":
        return Affine(self.start, self.steps, self.sizes, dtype)

    def scaled(self, factor: int, start: int = 0) -> "Affine":
        return Affine(self.start * factor + start, [step * factor for step in self.steps], self.sizes, self.dtype)

    def plus(self, other: "Affine") -> "Affine | None":
        """Return the sum, broadcast, in this block's type; None if the shapes do not fit."""
        rank = max(len(self.sizes), len(other.sizes))
        left, right = self._padded(rank), other._padded(rank)
        if any(n != m and 1 not in (n, m) for (_, n), (_, m) in zip(left, right)):
            return None
        steps = [s + t for (s, _), (t, _) in zip(left, right)]
        return Affine(self.start + other.start, steps, [max(n, m) for (_, n), (_, m) in zip(left, right)], self.dtype)

    def _padded(self, rank: int) -> list[tuple[int, int]]:
        return [(0, 1)] * (rank - len(self.sizes)) + list(zip(self.steps, self.sizes))

    def fits(self) -> bool:
        """Return False if an element leaves int32, where Triton's integers would wrap around."""
        spans = [step * (size - 1) for step, size in zip(self.steps, self.sizes)]
        lowest, highest = (self.start + sum(least(0, span) for span in spans) for least in (min, max))
        return self.dtype is not core.int32 or lowest in INT32 and highest in INT32

    def below(self, bound: int) -> "Box | None":
        """Return the mask of the elements below `bound`; None unless they increase along one axis."""
        axes = [axis for axis, size in enumerate(self.sizes) if size > 1]
        if len(axes) != 1 or self.steps[axes[0]] <= 0:
            return None
        counts = list(self.sizes)
        counts[axes[0]] = min(max(0, -((self.start - bound) // self.steps[axes[0]])), counts[axes[0]])
        return Box(counts, self.sizes)

    def expanded(self, at: Sequence[Any]) -> "Affine":
        """Return the block with an axis of size 1 wherever `at` has None."""
        axes = iter(zip(self.steps, self.sizes))
        steps, sizes = zip(*((0, 1) if index is None else next(axes) for index in at))
        return Affine(self.start, steps, sizes, self.dtype)


class Box(TensorHandle):
    """A mask: True where the index is below `counts` on each axis."""

    dtype = core.int1

    def __init__(self, counts: Sequence[int], sizes: Sequence[int]):
        self.counts, self.sizes = tuple(counts), tuple(sizes)
        self.attr = dict[str, Any]()
        self.is_full = self.counts == self.sizes

    @functools.cached_property
    def data(self) -> np.ndarray:
        mask = np.zeros(self.sizes, bool)
        mask[tuple(map(slice, self.counts))] = True
        return mask

    def both(self, other: "Box") -> "Box | None":
        """Return the mask where both are True, broadcast; None if the shapes do not fit."""
        axes = list(zip(self.counts, self.sizes, other.counts, other.sizes))
        if len(self.sizes) != len(other.sizes) or any(n != m and 1 not in (n, m) for _, n, _, m in axes):
            return None
        counts = [min(a, b) if n == m else a * b for a, n, b, m in axes]  # a count of 1 or 0 where the size is 1
        return Box(counts, [max(n, m) for _, n, _, m in axes])

    def expanded(self, at: Sequence[Any]) -> "Box":
        axes = iter(zip(self.counts, self.sizes))
        counts, sizes = zip(*((1, 1) if index is None else next(axes) for index in at))
        return Box(counts, sizes)


def plain(value: Any) -> Any:
    """Return the value of a constexpr, else the value."""
    return value.value if type(value) is core.constexpr else value


def is_block(value: Any) -> bool:
    return type(value) is core.tensor and type(value.type) is core.block_type


def block_type(dtype: tl.dtype, shape: tuple[int, ...]) -> Any:
    found = _types.get((dtype.name, shape))
    if found is None:
        found = _types[dtype.name, shape] = core.block_type(dtype, list(shape))
    return found


def block(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """Return a block of triton.language that holds `data`."""
    return core.tensor(TensorHandle(data, dtype), block_type(dtype, data.shape))


def scalar(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """Return a scalar of triton.language, whose data have the shape [1]."""
    return core.tensor(TensorHandle(data, dtype), dtype)


def lazy(handle: Affine | Box) -> tl.tensor:
    return core.tensor(handle, block_type(handle.dtype, handle.sizes))


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[tl.tuple, int, tl.tuple, tl.constexpr]:
    """Return shape and size as a type and as a tensor have them."""
    constants = tl.tuple([tl.constexpr(n) for n in shape])
    return tl.tuple(shape), core.validate_block_shape(shape), constants, tl.constexpr(math.prod(shape))


def replace() -> None:
    """Make the parts of a block's type once for each shape: each operation makes several types."""
    empty = tl.tuple([]), tl.constexpr(1)

    def make_block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, *self.of_tensor = _sizes((*core._unwrap_shape(shape),))

    def make_tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else empty

    def make_handle(self: Any, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, attr or {}

    core.block_type.__init__, core.tensor.__init__, TensorHandle.__init__ = make_block_type, make_tensor, make_handle
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.block_type.to_ir = lambda self, builder: self
    scalar_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: UINT64 if type.scalar.is_ptr() else scalar_dtype(type.scalar)
