"""Rotations (kernels/rope.py) of a wgmma's sums, and norms of heads (kernels/qk_norm.py) before
them: a thread holds both elements of a pair, and four lanes hold a head's row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gpt2_triton.kernels.rope import head_halves, joined_halves, rotated_halves

WEIGHTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def rotation(x, rope_ptr, first, T, HS: gl.constexpr):
    """Return cosines and sines for the rows of x [rows, heads*HS], of which row r is at
    position (first + r) % T.
    """
    half, _ = head_halves(x, HS)
    layout: gl.constexpr = gl.SliceLayout(1, half.type.layout)
    position = (first + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))) % T
    at = position[:, None] * HS + gl.arange(0, HS // 2, layout=gl.SliceLayout(0, layout))[None, :]
    cos = gl.load(rope_ptr + at)[:, None, :]
    sin = gl.load(rope_ptr + at + HS // 2)[:, None, :]
    return cos, sin


@gluon.jit
def rotated_before(x, unscale, cos, sin, m, n, M, rope):
    """Return x * unscale, a block from row m and column n of a matrix of M rows on, with the heads
    before column rope.columns normed, if `rope`, RopeArguments, has a w, and rotated.
    """
    x1, x2 = head_halves(x, rope.HS)
    if rope.w is None:
        x1, x2 = x1 * unscale, x2 * unscale
        y = rotated_halves(x1, x2, cos, sin)
    else:
        factor = _head_factors(x1, x2, unscale, m, n, M, rope)[:, :, None]
        x1, x2 = x1 * factor, x2 * factor
        w1, w2 = _weight_halves(n, x1, rope)
        y = rotated_halves(x1 * w1, x2 * w2, cos, sin)
    x = gl.convert_layout(joined_halves(x1, x2), x.type.layout, assert_trivial=True)
    y = gl.convert_layout(y, x.type.layout, assert_trivial=True)
    cols = n + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    return gl.where((cols < rope.columns)[None, :], y, x)


@gluon.jit
def _head_factors(x1, x2, unscale, m, n, M, rope):
    """Return [rows, heads]: rstd * unscale, or for heads of v unscale.  Store rstd."""
    squares = gl.sum(x1 * x1 + x2 * x2, 2)
    rstd = gl.rsqrt(squares * (unscale * unscale / rope.HS) + rope.eps)
    layout: gl.constexpr = rstd.type.layout
    r = m + gl.arange(0, x1.shape[0], layout=gl.SliceLayout(1, layout))
    head = n // rope.HS + gl.arange(0, x1.shape[1], layout=gl.SliceLayout(0, layout))
    heads = rope.columns // rope.HS
    at = r.to(gl.int64)[:, None] * heads + head[None, :]
    normed = (head < heads)[None, :]
    gl.store(rope.rstd + at, rstd, mask=(r < M)[:, None] & normed)
    return gl.where(normed, rstd * unscale, unscale)


@gluon.jit
def _weight_halves(n, half, rope):
    """Return the weights [1, heads, HS/2] of two halves [rows, heads, HS/2] from column n on."""
    HS: gl.constexpr = rope.HS
    layout: gl.constexpr = gl.SliceLayout(0, half.type.layout)
    head = n // HS + gl.arange(0, half.shape[1], layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, HS // 2, layout=gl.SliceLayout(0, layout))
    w = rope.w + gl.where(head < rope.NH, 0, HS)[:, None] + d[None, :]
    w1 = gl.load(w).to(gl.float32)
    w2 = gl.load(w + HS // 2).to(gl.float32)
    return w1[None, :, :], w2[None, :, :]


@gluon.jit
def rotated_back(x, cos, sin, HS: gl.constexpr):
    """Return x with each head rotated back."""
    x1, x2 = head_halves(x, HS)
    return gl.convert_layout(rotated_halves(x1, x2, cos, -sin), x.type.layout, assert_trivial=True)


@gluon.jit
def shared_weights(w_ptr, NOISE: gl.constexpr, HS: gl.constexpr):
    """Return a norm's weights and their inverses (kernels/qk_norm.py), [2, HS] in shared memory:
    registers would not hold them through a loop.
    """
    d = gl.arange(0, HS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    w = gl.load(w_ptr + d).to(gl.float32)
    error = NOISE * gl.load(w_ptr + (d + HS // 2) % HS).to(gl.float32)
    root = gl.rsqrt(gl.maximum(w * w + error * error, 1e-30))
    weights = gl.allocate_shared_memory(gl.float32, [2, HS], WEIGHTS)
    weights.index(0).store(w)
    weights.index(1).store(w * root * root)
    return weights


@gluon.jit
def head_norm_bwd(dy, y, cos, sin, weights, rstd, HS: gl.constexpr):
    """Return dx, and dz * z, of a head's dy and y [rows, HS]."""
    dz = rotated_back(dy, cos, sin, HS)
    z = rotated_back(y, cos, sin, HS)
    terms = dz * z
    mean = gl.sum(terms, 1) / HS
    columns: gl.constexpr = gl.SliceLayout(0, dy.type.layout)
    w = weights.index(0).load(columns)
    xhat = z * weights.index(1).load(columns)[None, :]
    return (dz * w[None, :] - xhat * mean[:, None]) * rstd[:, None], terms


@gluon.jit
def store_terms(part_ptr, stride, terms, HS: gl.constexpr):
    """Store the sums of two halves of the rows of terms [64, HS], a wgmma's sums."""
    warps = gl.sum(gl.reshape(terms, [4, 2, 8, HS]), 1)
    # a thread then adds 16 rows of one column, in place of lanes that add by exchange
    rows: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [2, 2], [1, 0])
    halves = gl.convert_layout(gl.reshape(warps, [32, HS]), rows)
    sums = gl.sum(gl.reshape(halves, [2, 16, HS]), 1)
    layout: gl.constexpr = sums.type.layout
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, HS, layout=gl.SliceLayout(0, layout))
    gl.store(part_ptr + half[:, None] * stride + d[None, :], sums)
