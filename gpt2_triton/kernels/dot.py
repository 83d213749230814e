"""The one matrix product all kernels share: operands in their stored dtype, sums in fp32.

bf16 goes to the tensor cores as it is; fp32 is multiplied exactly (ieee, no tf32).  Triton's interpreter multiplies
the raw bits of bf16, so there, and only there, the operands are widened first; products of bf16 are exact in fp32,
so the result means the same.
"""

import triton
import triton.language as tl

from gpt2_triton.kernels.tuning import INTERPRET

_WIDEN = tl.constexpr(INTERPRET)


@triton.jit
def dot(a, b, acc=None):
    """acc + a @ b in fp32; a is [..., M, K] and b is [..., K, N]."""
    if _WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
