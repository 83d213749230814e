"""Device functions of e4m3: rounding, the largest |x| of a tensor, and columns with their tokens in pairs; and the
scale of the bytes that keep gelu'.

fp8.py states what an operand in fp8 is.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from gpt2_triton.kernels.tuning import INTERPRET

AMAX_CELLS = 32  # of a tensor, so that programs seldom wait for each other

# gelu', -0.13 to 1.13, as a byte: round(STEPS * gelu') + ZERO
STEPS = tl.constexpr(202.25)
ZERO = tl.constexpr(26.0)

_EXACT = tl.constexpr(INTERPRET)
_CELLS = tl.constexpr(AMAX_CELLS)
_LARGEST = tl.constexpr(448.0)


@triton.jit
def to_e4m3(x):
    """Return fp32 x as e4m3, rounded to nearest even and saturated at 448; NaN stays NaN.

    An instruction of NVIDIA's GPUs does that; for sm_89 Triton 3.6 would cast to fp16 first, and so round twice.
    Triton's interpreter truncates and wraps, so there x is made a number of e4m3 before the cast.
    """
    if not _EXACT:
        if is_hip():
            return tl.clamp(x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [x], dtype=tl.float8e4nv, is_pure=True, pack=2
        )
    bits = x.to(tl.uint32, bitcast=True)
    a = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    a = tl.where(a > _LARGEST, _LARGEST, a)  # NaN is not above it
    normal = a.to(tl.uint32, bitcast=True)
    normal = (normal + 0x7FFFF + ((normal >> 20) & 1)) & 0xFFF00000
    rounded = tl.where(a < 0.015625, a + 24576.0 - 24576.0, normal.to(tl.float32, bitcast=True))
    code = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    code = tl.where(a != a, 0x7F, code).to(tl.uint8)
    return (code | ((bits >> 24) & 0x80).to(tl.uint8)).to(tl.float8e4nv, bitcast=True)


@triton.jit
def widened(x):
    """Return x of any dtype in fp32.  Triton's interpreter takes the NaN of e4m3 for 480, so there it is put back."""
    y = x.to(tl.float32)
    if _EXACT:
        if x.dtype == tl.float8e4nv:
            y = tl.where((x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, float("nan"), y)
    return y


@triton.jit
def row_maxima(top, x):
    """Return the larger of top and the largest |x| of each row, both as bits of fp32."""
    return tl.maximum(top, tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1))


@triton.jit
def record_bits(amax_ptr, top):
    """Record the largest of `top`, bits of |x|: a maximum that is exact in any order; NaN and infinity are largest."""
    tl.atomic_max(amax_ptr + tl.program_id(0) % _CELLS, tl.max(top), sem="relaxed")


@triton.jit
def quantise(x, scale_ptr, amax_ptr, rows=None):
    """Return x in e4m3 times its tensor's scale, and record its amax where there are cells for it: that of all its
    elements, or of the rows for which the mask `rows` is true.
    """
    y = to_e4m3(x * tl.load(scale_ptr))
    if amax_ptr is not None:  # last: before y, maxima took 46 more registers of layernorm at C 1600
        top = row_maxima(0, x)
        if rows is not None:
            top = tl.where(rows, top, 0)
        record_bits(amax_ptr, top)
    return y


@triton.jit
def token_at(p):
    """Return the token at position p of a transposed row."""
    return p // 16 * 16 + p % 2 * 8 + p % 16 // 2


@triton.jit
def paired_columns(x):
    """Return fp32 [R, C] as e4m3, transposed, with the tokens of a pair in an int16: [C, R / 2].  One thread holds rows
    g and g + 8 of a tensor core's result, so that on Hopper stmatrix stores them as they are.
    """
    r: tl.constexpr = x.shape[0]
    c: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(x, (r // 16, 2, 8, c)), (0, 2, 3, 1)))
    if _EXACT or is_hip():
        low = to_e4m3(low).to(tl.uint8, bitcast=True).to(tl.int16)
        pairs = low | (to_e4m3(high).to(tl.uint8, bitcast=True).to(tl.int16) << 8)
    else:  # casts of their own: ptxas 12.8 confuses the bytes of a cast that is stored both packed and apart
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
        )
    return tl.trans(tl.reshape(pairs, (r // 2, c)))
