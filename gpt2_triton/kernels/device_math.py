"""Device functions that kernels share: products, activations, the classifier's exponential, AdamW.

Values are fp32 unless a docstring says otherwise.
"""

import math

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

from gpt2_triton.kernels.e4m3 import widened
from gpt2_triton.kernels.tuning import INTERPRET

LOG2E = tl.constexpr(math.log2(math.e))

_WIDEN = tl.constexpr(INTERPRET)
_MAX_EXPONENT = tl.constexpr(108.0)  # 2^108 * 50304 columns * wte still fits fp32 and bf16
SLOPE = tl.constexpr(0.7978845608028654)  # u = x * (SLOPE + CURVE * x^2)
CURVE = tl.constexpr(0.035677408136300125)


@triton.jit
def dot(a, b, acc=None):
    """Return acc + a @ b in fp32; a is [..., M, K] and b [..., K, N], both in their stored dtype.

    bf16 goes to the tensor cores, fp32 is multiplied exactly (ieee, no tf32).  Triton's
    interpreter would multiply the raw bits of bf16, so there the operands are widened first;
    products of bf16 are exact in fp32.
    """
    if _WIDEN:
        a, b = widened(a), widened(b)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_added_in_fp32(a, b, acc):
    """Return acc + a @ b of fp8 operands, where tensor cores sum no more than a @ b."""
    if _WIDEN:
        acc = dot(a, b, acc)
    else:
        # without a limit of its terms Triton would let tensor cores add the product to acc
        acc += tl.dot(a, b, max_num_imprecise_acc=a.shape[1])
    return acc


@triton.jit
def _reciprocal(x):
    """Return 1 / x, within one ulp."""
    if not _WIDEN and is_cuda():
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        r = 1.0 / x
    return r


@triton.jit
def soft_cap(z, factor, CAP: tl.constexpr):
    """Return c = CAP * tanh(factor * z / CAP) and its derivative by factor * z, 1 - (c / CAP)^2."""
    # tanh(x) = 1 - 2 / (1 + e^2x)
    tanh = 1.0 - 2.0 * _reciprocal(1.0 + tl.exp2(z * (factor * (2.0 * LOG2E / CAP))))
    return tanh * CAP, 1.0 - tanh * tanh


@triton.jit
def exp_relative_tile(logits, reference, target, j):
    """Return p = 2^(logits - reference), at most 2^108, of a tile; 0 at the target.  reference and
    target belong to the tile's rows, j are the tile's columns.
    """
    # NaN stays NaN: a plain minimum would turn NaN into 2^108, and a broken
    # run would have a finite loss
    exponent = tl.minimum(
        logits - reference[:, None], _MAX_EXPONENT, propagate_nan=tl.PropagateNan.ALL
    )
    return tl.where(j[None, :] != target[:, None], tl.exp2(exponent), 0.0)


@triton.jit
def product(a, b):
    """Return a * b, rounded before it is added to anything.  Compilers fuse a product with a sum
    that follows; of a sum of two products they fuse either, and so two kernels may differ.  For
    Hopper and AMD they choose alike, and Hopper's bits stay.
    """
    if not _WIDEN and is_cuda() and (cuda_capability_geq(10, 0) or not cuda_capability_geq(9, 0)):
        c = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        c = a * b
    return c


# GELU in the tanh form of GPT-2 (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415):
#     s = sigmoid(2u),  u = sqrt(2/pi) * (x + 0.044715 * x^3),
#     2u' = 2 * sqrt(2/pi) * (1 + 3 * 0.044715 * x^2)
#     gelu(x)  = 0.5 * x * (1 + tanh(u)) = x * s
#     dgelu(x) = s + x * 2u' * (s - s^2)
# RESULT is the dtype to which the result is rounded: for 16 bits s = 0.5 + 0.5 * tanh(u) may
# be approximated, to 2^-11 where half an ulp of bf16 is 2^-9.  Errors against float64 are the
# same to four digits.  From sm_90 on this is left to hopper/activation.py: there the kernels
# of this directory keep their bits.


@triton.jit
def gelu_u(x, xx):
    """Return u; xx is x^2."""
    return x * (xx * CURVE + SLOPE)


@triton.jit
def _sigmoid_2u(x, xx, RESULT: tl.constexpr):
    """Return s; xx is x^2."""
    u = gelu_u(x, xx)
    if (
        not _WIDEN
        and RESULT.primitive_bitwidth <= 16
        and is_cuda()
        and not cuda_capability_geq(9, 0)
    ):
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
        s = t * 0.5 + 0.5  # one instruction for three
    else:
        s = tl.sigmoid(u * 2.0)
    return s


@triton.jit
def gelu(x, RESULT: tl.constexpr = tl.float32):
    return x * _sigmoid_2u(x, x * x, RESULT)


@triton.jit
def dgelu(x, RESULT: tl.constexpr = tl.float32):
    xx = x * x
    return dgelu_of(x, xx, _sigmoid_2u(x, xx, RESULT))


@triton.jit
def dgelu_of(x, xx, s):
    """Return the derivative of gelu at x; xx is x^2, and s is sigmoid(2u)."""
    return s + x * (xx * (6.0 * CURVE) + 2.0 * SLOPE) * (s - s * s)


# The square of ReLU (So et al. 2021, https://arxiv.org/abs/2109.08668): max(x, 0)^2


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


# The activations of matmul_act by name; each has a row in ACTIVATIONS of
# benchmarks/activations.py.


@triton.jit
def activation(x, NAME: tl.constexpr, RESULT: tl.constexpr):
    """Return the activation of x, which will be rounded to RESULT."""
    if NAME == "relu2":
        return relu(x) * relu(x)
    else:  # without it, the compiler would read the next lines for relu2 too
        tl.static_assert(NAME == "gelu")
        return gelu(x, RESULT)


@triton.jit
def dactivation(x, NAME: tl.constexpr, RESULT: tl.constexpr):
    if NAME == "relu2":
        return 2.0 * relu(x)
    else:
        tl.static_assert(NAME == "gelu")
        return dgelu(x, RESULT)


@triton.jit
def swiglu(g, u):
    """Return SwiGLU of a gate and a value; swiglu.py has the formulas."""
    return g * tl.sigmoid(g) * u


@triton.jit
def dswiglu(dh, g, u):
    """Return the gradients of g and u, from that of swiglu."""
    s = tl.sigmoid(g)
    return dh * u * s * (1.0 + g * (1.0 - s)), dh * g * s


@triton.jit
def adamw_moments(m, v, g, alpha1, alpha2):
    """Return AdamW's new m and v; adamw.py has the formulas."""
    return m + alpha1 * (g - m), v + alpha2 * (g * g - v)


@triton.jit
def decayed_update(w, update, lr, decay):
    """Return what is subtracted from w: the optimizer's update and w's decay, both times lr."""
    return lr * (update + decay * w)


@triton.jit
def adamw_update(w, m, v, lr, m_correction, v_correction, decay, eps):
    """Return what AdamW subtracts from w, given the new m and v."""
    return decayed_update(w, m * m_correction / (tl.sqrt(v * v_correction) + eps), lr, decay)


@triton.jit
def scale_and_add_target(acc, rs, ks, target, wte_ptr, c, C):
    """Return rs * acc + ks * wte[target]; rs, ks and target belong to the
    tile's rows, c are its columns.
    """
    mask = (target >= 0)[:, None] & (c < C)[None, :]
    wte = tl.load(wte_ptr + target[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.fma(ks[:, None], wte, rs[:, None] * acc)
