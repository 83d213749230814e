"""Makes Triton's interpreter faster for tests, with the same bits: its types, its loads and stores, its casts.

Assertions in kernels are on (tl.device_assert).
"""

import ctypes
import dataclasses
import functools
import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from gpt2_triton.kernels import e4m3

POINTER = np.dtype(np.uint64)
FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def make_fast() -> None:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True)
    make_types_fast()
    make_memory_fast()
    make_casts_fast()


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, int, tl.tuple, tl.constexpr]:
    """Return shape and size as a type and as a tensor have them."""
    constants = tl.tuple([tl.constexpr(n) for n in sizes])
    return tl.tuple(sizes), core.validate_block_shape(sizes), constants, tl.constexpr(math.prod(sizes))


def make_types_fast() -> None:
    """Make the parts of a block's type once for each shape: each operation makes several types."""
    empty = tl.tuple([]), tl.constexpr(1)

    def block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, *self.of_tensor = _shape((*core._unwrap_shape(shape),))

    def tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else empty

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.block_type.to_ir = lambda self, builder: self
    scalar_dtype = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: POINTER if type.scalar.is_ptr() else scalar_dtype(type.scalar)


def make_memory_fast() -> None:
    """Index an array that is the whole memory: Triton's loops take 20 ns for an element."""
    start = 64

    @functools.cache
    def memory(dtype: np.dtype) -> np.ndarray:
        return np.frombuffer((ctypes.c_char * (2**47 - start)).from_address(start), dtype)

    def places(ptrs: interpreter.TensorHandle, dtype: np.dtype) -> np.ndarray:
        return (ptrs.data.view(np.int64) - start) // dtype.itemsize

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any, **more: Any) -> interpreter.TensorHandle:
        element, read = ptrs.get_element_ty(), np.asarray(mask.data)  # Triton 3.6 may give an array's own .data
        array = memory(interpreter._get_np_dtype(element))
        at = places(ptrs, array.dtype)
        if read.all():
            return interpreter.TensorHandle(array[at], element)
        out = np.zeros(at.shape, array.dtype) if other is None else other.data.astype(array.dtype)
        out[read] = array[at[read]]
        return interpreter.TensorHandle(out, element)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *hints: Any, **more: Any) -> None:
        array, written = memory(value.data.dtype), np.asarray(mask.data)
        array[places(ptrs, array.dtype)[written]] = value.data[written]

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load, builder.create_masked_store = load, store


def make_casts_fast() -> None:
    """Cast between fp32 and bf16 by a shift, with Triton's bits but for subnormals, and round to fp8 by PyTorch.

    test_fp8.py::test_rounding_equals_torch_in_every_bit shows that the kernels' rounding gives PyTorch's bits.
    """
    other_casts = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, src: interpreter.TensorHandle, dst_type: tl.dtype) -> interpreter.TensorHandle:
        types = src.dtype.scalar, dst_type.scalar
        if types == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if types == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle((src.data.view(np.uint32) >> 16).astype(np.uint16), tl.bfloat16)
        return other_casts(self, src, dst_type)

    def rounded(x: tl.tensor, dtype: tl.dtype, dropped: int, largest: tl.constexpr, normal: float) -> tl.tensor:
        saturated = torch.tensor(x.handle.data).clamp(-largest.value, largest.value)
        code = saturated.to(FP8[dtype.name]).view(torch.uint8).numpy()
        return tl.tensor(interpreter.TensorHandle(code, dtype), x.type.with_element_ty(dtype))

    interpreter.InterpreterBuilder.cast_impl = cast
    rounded.replaced = e4m3._rounded
    e4m3._rounded = rounded
