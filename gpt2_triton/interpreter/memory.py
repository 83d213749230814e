"""Loads and stores: of rectangles by one copy, of other elements by numpy's indexing."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from gpt2_triton.interpreter import operators
from gpt2_triton.interpreter.blocks import Affine, Box, block, integer, is_block, plain, scalar
from gpt2_triton.interpreter.functions import in_language

START = 64  # ctypes makes no array at address 0
NAMES = {
    "fp32": np.float32,
    "bf16": np.uint16,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
}
STORED = {name: np.dtype(type) for name, type in NAMES.items()}


@functools.cache
def _memory() -> Any:
    """Return the whole memory from START on."""
    return memoryview((ctypes.c_char * (2**47 - START)).from_address(START))


@functools.cache
def _elements(dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(_memory(), dtype)


def _places(addresses: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the indices of addresses in _elements."""
    return (addresses.view(np.int64) - START) >> (dtype.itemsize.bit_length() - 1)


def _rectangle(
    address: int, counts: Sequence[int], strides: Sequence[int], dtype: np.dtype
) -> np.ndarray:
    """Return the memory at an address as an array, with strides in bytes."""
    if 0 in counts:
        return np.empty(counts, dtype)
    return np.ndarray(counts, dtype, _memory(), address - START, strides)


def _filled(part: np.ndarray, shape: tuple[int, ...], other: Any) -> np.ndarray:
    """Return a copy of `part`, with `other` behind it up to `shape`."""
    if part.shape == shape:
        return part.copy()
    data = np.full(shape, other, part.dtype)
    data[tuple(map(slice, part.shape))] = part
    return data


def _masked(pointers: Affine, mask: Any, dtype: np.dtype) -> np.ndarray | None:
    """Return the rectangle that affine pointers and a mask select; None if it is none."""
    counts = pointers.sizes
    if not counts and mask is None:
        return _rectangle(pointers.start, (1,), (0,), dtype)
    if mask is not None:
        if type(mask.handle) is not Box:
            return None
        mask = Box(counts, counts).both(mask.handle)
        if mask is None or mask.sizes != counts:
            return None
        counts = mask.counts
    return _rectangle(pointers.start, counts, pointers.steps, dtype)


def _stored(pointer: Any, mask: Any) -> np.dtype | None:
    """Return the type of the elements in memory; None where Triton loads and stores them."""
    if mask is not None and type(mask) is not core.tensor:
        return None
    element = getattr(pointer.dtype, "element_ty", None)
    return element and STORED.get(element.name)


def _load(
    triton: Callable, pointer: Any, mask: Any = None, other: Any = None, **hints: Any
) -> tl.tensor:
    mask = plain(mask)
    other = plain(other)
    dtype = _stored(pointer, mask)
    has_number = type(other) in (int, float) and (other == 0 or dtype == np.float32)
    if dtype is None or not (has_number or other is None):
        return triton(pointer, mask=mask, other=other, **hints)
    element = pointer.dtype.element_ty
    handle = pointer.handle
    if type(handle) is Affine:
        part = _masked(handle, mask, dtype)
        if part is not None:
            data = _filled(part, handle.sizes or (1,), other or 0)
            return block(data, element) if handle.sizes else scalar(data, element)
    make = block if is_block(pointer) else scalar
    at = _places(handle.data, dtype)
    if mask is None or mask.handle.data.all():
        return make(_elements(dtype)[at], element)
    data = np.full(at.shape, other or 0, dtype)
    read = np.broadcast_to(mask.handle.data, at.shape)
    data[read] = _elements(dtype)[at[read]]
    return make(data, element)


def _store(triton: Callable, pointer: Any, value: Any, mask: Any = None, **hints: Any) -> None:
    mask = plain(mask)
    value = plain(value)
    dtype = _stored(pointer, mask)
    if dtype is None or type(value) is not core.tensor:
        return triton(pointer, value, mask, **hints)
    handle = pointer.handle
    data = value.to(pointer.dtype.element_ty).handle.data
    if type(handle) is Affine:
        part = _masked(handle, mask, dtype)
        if part is not None:
            data = np.broadcast_to(data, handle.sizes or (1,))
            part[...] = data[tuple(map(slice, part.shape))]
            return None
    at = _places(handle.data, dtype)
    if mask is None or mask.handle.data.all():
        _elements(dtype)[at] = data
        return None
    written = np.broadcast_to(mask.handle.data, at.shape)
    _elements(dtype)[at[written]] = np.broadcast_to(data, at.shape)[written]


class _Window(NamedTuple):
    """A descriptor's matrix: address, and on each axis its size, bytes to the next
    element, and size of a block.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: np.dtype

    def at(self, offsets: Sequence[Any]) -> np.ndarray:
        """Return the part of the block at these offsets that lies in the matrix."""
        starts = [integer(offset) for offset in offsets]
        assert min(starts) >= 0, "a negative offset of a descriptor"
        assert starts[-1] * self.strides[-1] % 16 == 0, (
            "an offset of a descriptor must be 16-byte aligned"
        )
        counts = [max(0, min(n, size - o)) for n, size, o in zip(self.block, self.shape, starts)]
        address = self.address + sum(o * stride for o, stride in zip(starts, self.strides))
        return _rectangle(address, counts, self.strides, self.dtype)


def _window(handle: Any) -> _Window:
    """Return the window of a descriptor's handle, made once."""
    found = getattr(handle, "window", None)
    if found is None:
        dtype = interpreter._get_np_dtype(handle.base.dtype.element_ty)
        shape, strides = (
            tuple(int(n.data.item()) for n in numbers) for numbers in (handle.shape, handle.strides)
        )
        in_bytes = tuple(dtype.itemsize * n for n in strides)
        sizes = tuple(plain(n) for n in handle.block_shape)
        found = handle.window = _Window(int(handle.base.data.item()), shape, in_bytes, sizes, dtype)
    return found


def _replace_descriptors() -> None:
    """Replace loads and stores of descriptors, all of which read zeros outside their matrix."""

    def load(self: Any, offsets: Any) -> tl.tensor:
        window = _window(self.handle)
        return block(_filled(window.at(offsets), window.block, 0), self.dtype)

    def store(self: Any, offsets: Any, value: tl.tensor) -> None:
        window = _window(self.handle)
        part = window.at(offsets)
        data = value.to(self.dtype).handle.data
        assert data.shape == window.block, f"a block of {data.shape}, expected {window.block}"
        part[...] = data[tuple(map(slice, part.shape))]

    core.tensor_descriptor_base.load, core.tensor_descriptor_base.store = load, store


def replace() -> None:
    """Replace loads, stores and casts, for pointers of any kind too: Triton's loops
    take 20 ns for an element.
    """
    builder = InterpreterBuilder
    cast_by_triton = builder.cast_impl

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any, **more: Any) -> TensorHandle:
        # Triton 3.6 may give an array's own .data
        element = ptrs.get_element_ty()
        read = np.asarray(mask.data)
        array = _elements(interpreter._get_np_dtype(element))
        at = _places(ptrs.data, array.dtype)
        if read.all():
            return TensorHandle(array[at], element)
        out = np.zeros(at.shape, array.dtype) if other is None else other.data.astype(array.dtype)
        out[read] = array[at[read]]
        return TensorHandle(out, element)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *hints: Any, **more: Any) -> None:
        array = _elements(value.data.dtype)
        written = np.asarray(mask.data)
        array[_places(ptrs.data, array.dtype)[written]] = value.data[written]

    def cast(self: Any, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        data = operators.cast(src.data, src.dtype.scalar.name, dst_type.scalar.name)
        return (
            cast_by_triton(self, src, dst_type)
            if data is None
            else TensorHandle(data, dst_type.scalar)
        )

    builder.create_masked_load = load
    builder.create_masked_store = store
    builder.cast_impl = cast
    in_language("load", _load)
    in_language("store", _store)
    _replace_descriptors()
