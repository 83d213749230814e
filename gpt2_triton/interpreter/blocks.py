"""Blocks: their types, made once for each shape, and blocks whose
elements follow from a few numbers.

An address of an element is most often start + row * step + column.  Such a block of
integers or pointers is an Affine, as is a single one, and a mask that compares one with a
bound is a Box.  A load through both copies a rectangle of the memory.  Whoever reads their
`data` gets the array, made then.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    """Integers or addresses: start + step * index, summed over the axes; with
    step 0 on axes of size 1.
    """

    def __init__(self, start: int, steps: tuple[int, ...], sizes: tuple[int, ...], dtype: tl.dtype):
        self.start = start
        self.steps = steps
        self.sizes = sizes
        self.dtype = dtype

    @functools.cached_property
    def data(self) -> np.ndarray:
        total = np.full([1] * max(1, len(self.sizes)), self.start, np.int64)
        for axis, (step, size) in enumerate(zip(self.steps, self.sizes)):
            shape = [1] * len(self.sizes)
            shape[axis] = size
            total = total + (np.arange(size) * step).reshape(shape)
        return (
            total.view(UINT64) if self.dtype.is_ptr() else total.astype(INTEGERS[self.dtype.name])
        )

    def cast(self, dtype: tl.dtype) -> "Affine":
        return Affine(self.start, self.steps, self.sizes, dtype)

    def scaled(self, factor: int, start: int = 0) -> "Affine":
        return Affine(
            self.start * factor + start,
            tuple(n * factor for n in self.steps),
            self.sizes,
            self.dtype,
        )

    def plus(self, other: "Affine") -> "Affine | None":
        """Return the sum, broadcast, in this block's type; None if the shapes do not fit."""
        rank = max(len(self.sizes), len(other.sizes))
        left = self._padded(rank)
        right = other._padded(rank)
        if any(n != m and 1 not in (n, m) for (_, n), (_, m) in zip(left, right)):
            return None
        steps = tuple(s + t for (s, _), (t, _) in zip(left, right))
        sizes = tuple(max(n, m) for (_, n), (_, m) in zip(left, right))
        return Affine(self.start + other.start, steps, sizes, self.dtype)

    def _padded(self, rank: int) -> list[tuple[int, int]]:
        return [(0, 1)] * (rank - len(self.sizes)) + list(zip(self.steps, self.sizes))

    def fits(self) -> bool:
        """Return False if an element leaves int32, where Triton's integers would wrap around."""
        spans = [step * (size - 1) for step, size in zip(self.steps, self.sizes)]
        lowest, highest = (
            self.start + sum(least(0, span) for span in spans) for least in (min, max)
        )
        return self.dtype is not core.int32 or lowest in INT32 and highest in INT32

    def below(self, bound: int) -> "Box | None":
        """Return the mask of the elements below `bound`; None unless
        they increase along one axis.
        """
        axes = [axis for axis, size in enumerate(self.sizes) if size > 1]
        if len(axes) != 1 or self.steps[axes[0]] <= 0:
            return None
        counts = list(self.sizes)
        counts[axes[0]] = min(
            max(0, -((self.start - bound) // self.steps[axes[0]])), counts[axes[0]]
        )
        return Box(tuple(counts), self.sizes)

    def expanded(self, at: Sequence[Any]) -> "Affine":
        """Return the block with an axis of size 1 wherever `at` has None."""
        axes = iter(zip(self.steps, self.sizes))
        steps, sizes = zip(*((0, 1) if index is None else next(axes) for index in at))
        return Affine(self.start, steps, sizes, self.dtype)

    def set_attr(self, key: str, value: Any) -> None:
        """Ignore a hint for the compiler."""


class Box(TensorHandle):
    """A mask: True where the index is below `counts` on each axis."""

    dtype = core.int1

    def __init__(self, counts: tuple[int, ...], sizes: tuple[int, ...]):
        self.counts, self.sizes = counts, sizes
        self.is_full = counts == sizes

    @functools.cached_property
    def data(self) -> np.ndarray:
        mask = np.zeros(self.sizes, bool)
        mask[tuple(map(slice, self.counts))] = True
        return mask

    def both(self, other: "Box") -> "Box | None":
        """Return the mask where both are True, broadcast; None if the shapes do not fit."""
        axes = list(zip(self.counts, self.sizes, other.counts, other.sizes))
        if len(self.sizes) != len(other.sizes) or any(
            n != m and 1 not in (n, m) for _, n, _, m in axes
        ):
            return None
        # of size 1 the count is 1 or 0
        counts = tuple(min(a, b) if n == m else a * b for a, n, b, m in axes)
        return Box(counts, tuple(max(n, m) for _, n, _, m in axes))

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
    return core.tensor(
        handle, block_type(handle.dtype, handle.sizes) if handle.sizes else handle.dtype
    )


def whole(value: int, dtype: tl.dtype = core.int32) -> tl.tensor:
    """Return an integer, or a pointer, as a scalar."""
    return core.tensor(Affine(value, (), (), dtype), dtype)


def integer(value: Any) -> int:
    """Return the integer of a scalar, a constexpr or an int."""
    value = plain(value)
    if type(value) is int:
        return value
    handle = value.handle
    return handle.start if type(handle) is Affine else int(handle.data.item())


class _Sizes(NamedTuple):
    """A shape and its product, as a block's type has them and as a tensor does."""

    shape: tl.tuple
    numel: int
    constants: tl.tuple
    product: tl.constexpr


@functools.cache
def _sizes(shape: tuple[int, ...]) -> _Sizes:
    constants = tl.tuple([tl.constexpr(n) for n in shape])
    return _Sizes(
        tl.tuple(shape), core.validate_block_shape(shape), constants, tl.constexpr(math.prod(shape))
    )


def replace() -> None:
    """Make the parts of a block's type once for each shape: each operation makes several types."""
    none = _Sizes(tl.tuple([]), 1, tl.tuple([]), tl.constexpr(1))  # a scalar's

    def make_block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        self.element_ty = element_ty
        self.sizes = _sizes((*core._unwrap_shape(shape),))
        self.shape = self.sizes.shape
        self.numel = self.sizes.numel

    def make_tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        sizes = type.sizes if type.is_block() else none
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape = sizes.constants
        self.numel = sizes.product

    def make_handle(self: Any, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = attr or {}

    core.block_type.__init__ = make_block_type
    core.tensor.__init__ = make_tensor
    TensorHandle.__init__ = make_handle
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.block_type.to_ir = lambda self, builder: self
    scalar_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: (
        UINT64 if type.scalar.is_ptr() else scalar_dtype(type.scalar)
    )
