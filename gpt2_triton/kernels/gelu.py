"""GELU in the tanh form of GPT-2 (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415), as device functions on
fp32 values.

u = sqrt(2/pi) * (x + 0.044715 * x^3)
gelu(x)  = 0.5 * x * (1 + tanh(u)) = x * sigmoid(2u)
dgelu(x) = s + x * s * (1 - s) * 2u',   s = sigmoid(2u),   2u' = 2 * sqrt(2/pi) * (1 + 3 * 0.044715 * x^2)
"""

import triton
import triton.language as tl

_TWO_K = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2/pi)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def gelu(x):
    return x * tl.sigmoid(x * _TWO_K * (1.0 + x * x * _CUBIC))


@triton.jit
def dgelu(x):
    s = tl.sigmoid(x * _TWO_K * (1.0 + x * x * _CUBIC))
    return s + x * s * (1.0 - s) * _TWO_K * (1.0 + x * x * (3.0 * _CUBIC))
