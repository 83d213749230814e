"""Makes Triton's interpreter faster for tests: casts in one step that take it, or a kernel, ten to thirty."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from gpt2_triton.kernels import e4m3

FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


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
