"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) of the
pairs (i, i + HS/2) of a head:

    y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin

A table, fp32 [positions, HS], holds the HS/2 cosines of a position, then its sines.  The
product that gives q and k rotates them in its epilogue.  Attention's backward pass rotates
their gradients back, by -sin.  qk_norm.py has the norm that may come before the rotation.
"""

import triton
import triton.language as tl

from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.table_file import Row


@triton.jit
def head_halves(x, HS: tl.constexpr):
    """Return the halves of the heads of x [rows, heads*HS], each [rows, heads, HS/2]."""
    halves = tl.reshape(x, (x.shape[0], x.shape[1] // HS, 2, HS // 2))
    return tl.split(tl.permute(halves, (0, 1, 3, 2)))


@triton.jit
def joined_halves(x1, x2):
    """Return heads [rows, heads*HS] from their halves."""
    x = tl.permute(tl.join(x1, x2), (0, 1, 3, 2))
    return tl.reshape(x, (x1.shape[0], x1.shape[1] * x1.shape[2] * 2))


@triton.jit
def rotated_halves(x1, x2, cos, sin):
    """Return heads [rows, heads*HS], rotated, from their halves; cos
    and sin are [rows, 1, HS/2].
    """
    return joined_halves(x1 * cos - x2 * sin, x2 * cos + x1 * sin)


@triton.jit
def cos_sin(rope_ptr, position, HS: tl.constexpr):
    """Return cosines and sines, [rows, 1, HS/2], of the rows' positions; HS is a power of 2."""
    at = position[:, None] * HS + tl.arange(0, HS // 2)[None, :]
    cos = tl.load(rope_ptr + at)[:, None, :]
    sin = tl.load(rope_ptr + at + HS // 2)[:, None, :]
    return cos, sin


@triton.jit
def rotated_back(x, cos, sin, HS: tl.constexpr):
    """Return x [rows, heads*HS] with each row rotated back from its position."""
    x1, x2 = head_halves(x, HS)
    return rotated_halves(x1, x2, cos, -sin)


def row_for_heads(row: Row, HS: int) -> Row:
    """Return a product's launch parameters with tiles whose halves have whole heads of HS columns;
    0 columns: `row` as it is.
    """
    wider = max(1, 2 * HS // row["BLOCK_N"])
    columns = row["BLOCK_N"] * wider
    # registers hold the tile, shared memory its operands
    fits = tuning.has_tma() and row["BLOCK_M"] * columns <= 128 * 128
    return row | dict(BLOCK_N=columns, BLOCK_M=row["BLOCK_M"] // (1 if fits else wider))
