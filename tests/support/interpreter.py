"""Triton's interpreter in tests: assertions in kernels are on
(tl.device_assert), and PyTorch rounds to fp8.

The kernels' own rounding takes ten operations there.
test_fp8.py::test_rounding_equals_torch_in_every_bit shows that it gives PyTorch's bits.
"""

import dataclasses

import torch
import triton.language as tl
from triton.runtime import interpreter

from gpt2_triton.interpreter import make_fast
from gpt2_triton.kernels import e4m3

FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def prepare() -> None:
    make_fast()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True)

    def rounded(
        x: tl.tensor, dtype: tl.dtype, dropped: int, largest: tl.constexpr, normal: float
    ) -> tl.tensor:
        saturated = torch.tensor(x.handle.data).clamp(-largest.value, largest.value)
        code = saturated.to(FP8[dtype.name]).view(torch.uint8).numpy()
        return tl.tensor(interpreter.TensorHandle(code, dtype), x.type.with_element_ty(dtype))

    rounded.replaced = e4m3._rounded
    e4m3._rounded = rounded
