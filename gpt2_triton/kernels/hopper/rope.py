"""Rotations (kernels/rope.py) of a wgmma's sums: a thread holds both elements of a
pair, and exchanges nothing.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gpt2_triton.kernels.rope import head_halves, rotated_halves


class Rotation(NamedTuple):
    """The rotation of a product's heads; all None where it has none."""

    table: Any
    HS: Any  # columns of a head
    T: Any  # tokens of a sequence
    columns: Any  # to rotate, the first ones


@gluon.jit
def rotation(x, rope_ptr, first, T, HS: gl.constexpr):
    """Return cosines and sines for the rows of x [rows, heads*HS], of which row r is at
    position (first + r) % T.
    """
    half, _ = head_halves(x, HS)
    layout: gl.constexpr = gl.SliceLayout(1, half.type.layout)
    position = (first + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))) % T
    at = position[:, None] * HS + gl.arange(0, HS // 2, layout=gl.SliceLayout(0, layout))[None, :]
    return gl.load(rope_ptr + at)[:, None, :], gl.load(rope_ptr + at + HS // 2)[:, None, :]


@gluon.jit
def rotated_before(x, cos, sin, n, end, HS: gl.constexpr):
    """Return x, whose first column is column n of a matrix, with the heads
    before column `end` rotated.
    """
    cols = n + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    return gl.where((cols < end)[None, :], rotated(x, cos, sin, HS), x)


@gluon.jit
def rotated(x, cos, sin, HS: gl.constexpr):
    """Return x with each head rotated."""
    x1, x2 = head_halves(x, HS)
    return gl.convert_layout(rotated_halves(x1, x2, cos, sin), x.type.layout, assert_trivial=True)
