"""Rotations (kernels/rope.py) of a wgmma's sums, and norms of heads (kernels/qk_norm.py) before
them: a thread holds both elements of a pair, and four lanes hold a head's row.
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
    w: Any  # of the norm, [2, HS]; None without, and then the next three are not read
    rstd: Any  # [rows, heads]
    NH: Any  # heads of q
    eps: Any


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
def rotated_before(x, cos, sin, m, n, M, rope):
    """Return x, a block from row m and column n of a matrix on, with the heads before column
    rope.columns normed, if the Rotation has a w, and rotated.  M is the number of rows.
    """
    x1, x2 = head_halves(x, rope.HS)
    if rope.w is not None:
        x1, x2 = _normed_halves(x1, x2, m, n, M, rope)
    y = rotated_halves(x1, x2, cos, sin)
    cols = n + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    y = gl.convert_layout(y, x.type.layout, assert_trivial=True)
    return gl.where((cols < rope.columns)[None, :], y, x)


@gluon.jit
def _normed_halves(x1, x2, m, n, M, rope):
    """Return the halves [rows, heads, HS/2] of w * xhat, and store rstd."""
    HS: gl.constexpr = rope.HS
    rstd = gl.rsqrt(gl.sum(x1 * x1 + x2 * x2, 2) / HS + rope.eps)
    of_rows: gl.constexpr = rstd.type.layout
    r = m + gl.arange(0, x1.shape[0], layout=gl.SliceLayout(1, of_rows))
    head = n // HS + gl.arange(0, x1.shape[1], layout=gl.SliceLayout(0, of_rows))
    heads = rope.columns // HS
    at = r.to(gl.int64)[:, None] * heads + head[None, :]
    gl.store(rope.rstd + at, rstd, mask=(r < M)[:, None] & (head < heads)[None, :])
    of_heads: gl.constexpr = gl.SliceLayout(0, x1.type.layout)
    head = n // HS + gl.arange(0, x1.shape[1], layout=gl.SliceLayout(1, of_heads))
    d = gl.arange(0, HS // 2, layout=gl.SliceLayout(0, of_heads))
    w = rope.w + gl.where(head < rope.NH, 0, HS)[:, None] + d[None, :]
    w1 = gl.load(w).to(gl.float32)
    w2 = gl.load(w + HS // 2).to(gl.float32)
    rstd = rstd[:, :, None]
    return x1 * rstd * w1[None, :, :], x2 * rstd * w2[None, :, :]


@gluon.jit
def rotated_back(x, cos, sin, HS: gl.constexpr):
    """Return x with each head rotated back."""
    x1, x2 = head_halves(x, HS)
    return gl.convert_layout(rotated_halves(x1, x2, cos, -sin), x.type.layout, assert_trivial=True)


@gluon.jit
def head_norm_bwd(dy, y, cos, sin, w_ptr, rstd, NOISE: gl.constexpr, HS: gl.constexpr):
    """Return dx, and dw's terms of these rows, of a head's dy and y [rows, HS]."""
    dz = rotated_back(dy, cos, sin, HS)
    z = rotated_back(y, cos, sin, HS)
    # a thread computes the inverse of one column's weight, and gets those of its columns
    each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    d = gl.arange(0, HS, layout=each)
    own = gl.load(w_ptr + d).to(gl.float32)
    error = NOISE * gl.load(w_ptr + (d + HS // 2) % HS).to(gl.float32)
    root = gl.rsqrt(gl.maximum(own * own + error * error, 1e-30))
    columns: gl.constexpr = gl.SliceLayout(0, dy.type.layout)
    xhat = z * gl.convert_layout(own * root * root, columns)[None, :]
    w = gl.load(w_ptr + gl.arange(0, HS, layout=columns)).to(gl.float32)
    mean = gl.sum(dz * z, 1) / HS
    return (dz * w[None, :] - xhat * mean[:, None]) * rstd[:, None], dz * xhat
