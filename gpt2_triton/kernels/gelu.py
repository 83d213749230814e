"""GELU in the tanh form of GPT-2 (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415), as device functions on
fp32 values.

s = sigmoid(2u),  u = sqrt(2/pi) * (x + 0.044715 * x^3),  2u' = 2 * sqrt(2/pi) * (1 + 3 * 0.044715 * x^2)
gelu(x)  = 0.5 * x * (1 + tanh(u)) = x * s
dgelu(x) = s + x * 2u' * (s - s^2)

FAST takes s = 0.5 + 0.5 * tanh(u) from the one instruction that approximates tanh, to 2^-11 of its value: where bf16 is
stored, whose half ulp is 2^-9, errors measured against float64 are the same to four digits (docs/measured.md), and a
product's epilogue is hidden that two instructions of that unit would leave exposed.
"""

import triton
import triton.language as tl

_SLOPE = tl.constexpr(0.7978845608028654)  # u = x * (_SLOPE + _CURVE * x^2)
_CURVE = tl.constexpr(0.035677408136300125)


@triton.jit
def _sigmoid_2u(x, xx, FAST: tl.constexpr):
    u = x * (xx * _CURVE + _SLOPE)
    if FAST:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
        return t * 0.5 + 0.5
    return tl.sigmoid(u * 2.0)


@triton.jit
def gelu(x, FAST: tl.constexpr = False):
    return x * _sigmoid_2u(x, x * x, FAST)


@triton.jit
def dgelu(x, FAST: tl.constexpr = False):
    xx = x * x
    s = _sigmoid_2u(x, xx, FAST)
    return s + x * (xx * (6.0 * _CURVE) + 2.0 * _SLOPE) * (s - s * s)
