"""An fp32 master weight, stored as the bf16 weight and 16 more bits: a parameter costs 4 bytes
instead of 6.

With u the bits of the fp32 number:
    hi = (u + 0x8000) >> 16  is the bf16 weight, u rounded to nearest with ties away from zero;
    low = u & 0xFFFF
    u  = (hi << 16 | low) - (0x10000 if low >= 0x8000 else 0), which
       undoes the carry of the rounding
"""

import triton
import triton.language as tl


@triton.jit
def join_master(hi, low):
    """Return fp32 from its bf16 rounding and its lower 16 bits, an int16."""
    upper = hi.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    rest = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return ((upper | rest) - tl.where(rest >= 0x8000, 0x10000, 0).to(tl.uint32)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def split_master(w):
    """Return fp32 w as (bf16, the lower 16 bits as int16), the inverse of join_master."""
    bits = w.to(tl.uint32, bitcast=True)
    hi = ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return hi, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
