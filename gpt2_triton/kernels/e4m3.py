"""Device functions of e4m3 and e5m2: rounding, a tensor's largest |x|, transposed
storage; and gelu' as a byte.

fp8.py defines an operand in fp8, and the order of tokens in its transposed form.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from gpt2_triton.kernels.tuning import INTERPRET

P_SHIFT = tl.constexpr(-7)  # the classifier stores p * 2^7, in a row's unit
AMAX_CELLS = 32  # cells of a tensor's amax: several, so that programs seldom wait for each other
CELLS = tl.constexpr(AMAX_CELLS)

# gelu', -0.13 to 1.13, as a byte: round(STEPS * gelu') + ZERO
STEPS = tl.constexpr(202.25)
ZERO = tl.constexpr(26.0)

_EXACT = tl.constexpr(INTERPRET)
_LARGEST = tl.constexpr(448.0)
_LARGEST_E5M2 = tl.constexpr(57344.0)


@triton.jit
def to_e4m3(x):
    """Return fp32 x as e4m3, rounded to nearest even and saturated at 448; NaN stays NaN.

    NVIDIA's instruction does that.  It is inline because Triton 3.6 casts to fp16 first for sm_89
    and so rounds twice.  The interpreter's cast truncates and wraps, so there x is rounded to a
    number of e4m3 before the cast.
    """
    if not _EXACT:
        if is_hip():
            return tl.clamp(x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL).to(
                tl.float8e4nv
            )
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f",
            [x],
            dtype=tl.float8e4nv,
            is_pure=True,
            pack=2,
        )
    return _rounded(x, tl.float8e4nv, 20, _LARGEST, 0.015625)


@triton.jit
def to_e5m2(x):
    """Return fp32 x as e5m2, rounded to nearest even and saturated at 57344; NaN stays NaN."""
    if not _EXACT:
        if is_hip():
            return tl.clamp(x, -_LARGEST_E5M2, _LARGEST_E5M2, propagate_nan=tl.PropagateNan.ALL).to(
                tl.float8e5
            )
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;",
            "=h,f,f",
            [x],
            dtype=tl.float8e5,
            is_pure=True,
            pack=2,
        )
    return _rounded(x, tl.float8e5, 21, _LARGEST_E5M2, 2.0**-14)


@triton.jit
def peek_exponent(peek):
    """Return floor(log2(1 + peek)); a row's p in fp8 has the unit two to this power."""
    return (((1.0 + peek).to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def nearest_e5m2(x):
    """Return the number of e5m2 that to_e5m2 gives, in fp32."""
    if _EXACT or is_hip():
        return to_e5m2(x).to(tl.float32)
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 pair, low, high;
        .reg .b32 wide;
        cvt.rn.satfinite.e5m2x2.f32 pair, $3, $2;
        cvt.rn.f16x2.e5m2x2 wide, pair;
        mov.b32 {low, high}, wide;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }""",
        "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _rounded(
    x, dtype: tl.constexpr, DROPPED: tl.constexpr, LARGEST: tl.constexpr, NORMAL: tl.constexpr
):
    """Return x in `dtype`, without DROPPED bits of fp32's mantissa; NORMAL: the least normal."""
    bits = x.to(tl.uint32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size > LARGEST, LARGEST, size)  # NaN is not above it
    size_bits = size.to(tl.uint32, bitcast=True)
    # to nearest; the last bit that stays makes a tie even
    last_bit = (size_bits >> DROPPED) & 1
    carried = size_bits + (2 ** (DROPPED - 1) - 1) + last_bit
    normal = ((carried >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
    # of numbers so large an ulp is that of the least normal numbers
    whole: tl.constexpr = 1.5 * NORMAL * 2.0**DROPPED
    rounded = tl.where(size < NORMAL, size + whole - whole, normal)
    code = rounded.to(dtype).to(tl.uint8, bitcast=True)
    code = tl.where(size != size, 0x7F, code).to(tl.uint8)
    sign = ((bits >> 24) & 0x80).to(tl.uint8)
    return (code | sign).to(dtype, bitcast=True)


@triton.jit
def widened(x):
    """Return x of any dtype in fp32.  Triton's interpreter reads e4m3's NaN as 480,
    so there NaN is restored.
    """
    y = x.to(tl.float32)
    if _EXACT:
        if x.dtype == tl.float8e4nv:
            y = tl.where((x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, float("nan"), y)
    return y


@triton.jit
def row_maxima(amax_bits, x):
    """Return the larger of amax_bits and the largest |x| of each row, both as bits of fp32."""
    return tl.maximum(amax_bits, tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1))


@triton.jit
def record_bits(amax_ptr, amax_bits):
    """Record the largest of amax_bits, bits of |x|.  Maxima are exact in any order; NaN wins."""
    tl.atomic_max(amax_ptr + tl.program_id(0) % CELLS, tl.max(amax_bits), sem="relaxed")


@triton.jit
def quantise(x, scale_ptr, amax_ptr, rows=None):
    """Return `quantised` by a scale in memory."""
    return quantised(x, tl.load(scale_ptr), amax_ptr, rows)


@triton.jit
def quantised(x, scale, amax_ptr, rows=None):
    """Return x * scale in e4m3.  With amax_ptr, record the largest |x| of the rows
    that the mask `rows` selects.
    """
    y = to_e4m3(x * scale)
    # below y: above y, the maxima cost layernorm 46 more registers at C 1600
    if amax_ptr is not None:
        amax_bits = row_maxima(0, x)
        if rows is not None:
            amax_bits = tl.where(rows, amax_bits, 0)
        record_bits(amax_ptr, amax_bits)
    return y


@triton.jit
def token_at(p):
    """Return the token at position p of a transposed row."""
    # of each 16 tokens, g and g + 8 are at 2g and 2g + 1
    return p // 16 * 16 + p % 2 * 8 + p % 16 // 2


@triton.jit
def paired_columns(x, E5M2: tl.constexpr = False):
    """Return fp32 [R, C] in e4m3 or e5m2, transposed, as int16 [C, R / 2]: an int16 holds tokens g
    and g + 8 of 16.  A thread has both tokens in a tensor core's result, so Hopper's stmatrix
    stores an int16 without an exchange.  E5M2 is for NVIDIA's GPUs only.
    """
    r: tl.constexpr = x.shape[0]
    c: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(x, (r // 16, 2, 8, c)), (0, 2, 3, 1)))
    if _EXACT or is_hip():
        low = to_e4m3(low).to(tl.uint8, bitcast=True).to(tl.int16)
        pairs = low | (to_e4m3(high).to(tl.uint8, bitcast=True).to(tl.int16) << 8)
    else:
        # a second cast: ptxas 12.8 confuses the bytes of one cast that is
        # stored packed and unpacked
        name: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.satfinite." + name + ".f32 $0, $2, $1;",
            "=h,f,f",
            [low, high],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        )
    return tl.trans(tl.reshape(pairs, (r // 2, c)))


def cuts_fp8_sums() -> bool:
    """Return whether tensor cores may cut sums of fp8 products: Ada's and Hopper's (fp8.md)."""
    if INTERPRET:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch in (89, 90)
