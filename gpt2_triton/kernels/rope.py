"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) of the pairs (i, i + HS/2) of a head:

    y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin

A table, fp32 [positions, HS], holds the HS/2 cosines of a position, then its sines.  The product that gives q and k
rotates them in its epilogue.  Attention's backward pass rotates their gradients back, by -sin.
"""

import triton
import triton.language as tl


@triton.jit
def rotated(x, rope_ptr, position, BACK: tl.constexpr, HS: tl.constexpr):
    """Return x [rows, heads*HS] with each row rotated to its position, or if BACK, from there; HS is a power of 2."""
    ROWS: tl.constexpr = x.shape[0]
    HEADS: tl.constexpr = x.shape[1] // HS
    at = position[:, None] * HS + tl.arange(0, HS // 2)[None, :]
    cos = tl.load(rope_ptr + at)[:, None, :]
    sin = tl.load(rope_ptr + at + HS // 2)[:, None, :]
    if BACK:
        sin = -sin
    x1, x2 = tl.split(tl.permute(tl.reshape(x, (ROWS, HEADS, 2, HS // 2)), (0, 1, 3, 2)))
    y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    return tl.reshape(tl.permute(y, (0, 1, 3, 2)), (ROWS, HEADS * HS))
