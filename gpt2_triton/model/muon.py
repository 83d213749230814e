"""Muon's polynomials, and its views of the arena: the layers' matrices
in classes of one shape each.

kernels/muon.py has the arithmetic, and muon_update.py has its order.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from gpt2_triton.model import sharding
from gpt2_triton.model.arena import eval_shape
from gpt2_triton.model.tables import State
from gpt2_triton.operands import Matrices

# Each row (a, b, c) is p(s) = a s + b s^3 + c s^5 of the singular values s.  The rows are Polar
# Express (Amsel et al.  2025, https://arxiv.org/abs/2505.16932).  The rows before a row map
# [LOWEST, 1] into an interval, and on this interval the row is the odd quintic nearest to 1.  So
# no other five rows end nearer to 1.  All rows but the last take s / 1.01: rounding to bf16 may
# lift a singular value above its interval, where the next polynomial grows.
# tests/model/test_muon.py derives them again.
LOWEST = 1e-3 / 1.02 / 1.01  # of a singular value 1e-3 ||x||, after division by 1.02 ||x|| and 1.01
POLAR_EXPRESS = (
    (8.20615719576407, -22.90471716679143, 16.462724596901133),
    (4.067930319748221, -2.861538944815634, 0.5183433066308626),
    (3.915337344362215, -2.824678668750206, 0.5247598413274771),
    (3.305347928536547, -2.429741964928751, 0.4868975867879092),
    (2.31826076950585, -1.6846590469245175, 0.4205115823539365),
)


class MatrixClass(NamedTuple):
    """A class of matrix_shapes in all layers."""

    part: Matrices  # what this rank updates; x is a part of `whole`
    parts: list[range]  # the elements in a layer that each rank updates
    whole: Tensor  # [matrices, rows, columns], all matrices of the class
    # [k, rows, columns], the matrices that this rank orthogonalises: rank, rank + ranks, ...
    owned: Tensor
    next: Tensor  # [k, rows, columns], the iterate after `owned`
    gram: Tensor  # [k, c, c], c the smaller of rows and columns
    poly: Tensor  # [k, c, c]


def matrix_shapes(table: type, dims: dict[str, int]) -> list[tuple[int, int, int]]:
    """Return (rows, columns, count) of each class of a layer's matrices, in the flat order:
    neighbours of one shape are one class; none without Muon.

    >>> from gpt2_triton.model.gpt2.buffers import Params
    >>> matrix_shapes(Params, dict(C=4, D=12, F=16, G=16, No=1))
    [(4, 4, 4), (16, 4, 1), (4, 16, 1)]
    """
    if not dims["No"]:
        return []
    declared = [
        field.metadata for field in dataclasses.fields(table) if field.metadata["group"] == "layer"
    ]
    shapes = [
        eval_shape(shape, dims)
        for m in declared
        for shape in (m["matrices"] or m["shape"]).split(", ")
    ]
    return [(rows, columns, len(list(same))) for (rows, columns), same in itertools.groupby(shapes)]


def matrix_classes(
    table: type,
    state: State,
    dims: dict[str, int],
    rank: int,
    momentum: float,
    decay: float,
) -> Iterator[MatrixClass]:
    """Yield the classes of the layers' matrices, in the flat order; `orth` has each
    directly after the one before.
    """
    L = dims["L"]
    ranks = dims["ranks"]
    zero = dims["zero"]
    layer = sharding.buckets(dims)[1]
    before = 0
    share = layer.padded // ranks if zero else layer.length
    starts = [r * share if zero else 0 for r in range(ranks)]  # of what each rank updates, there
    stride = share if zero else layer.padded
    g_stride = share if zero == 2 else layer.padded
    low = state.master_low
    grads = sharding.owned_shards(dims, rank)[1].grad if zero else layer.start
    for rows, columns, count in matrix_shapes(table, dims):
        size = rows * columns * count
        c = min(rows, columns)
        parts = [_common(start, share, before, size) for start in starts]
        part = parts[rank]
        whole = state.orth[L * before : L * (before + size)].view(-1, rows, columns)
        n = len(part)
        at = before + part.start  # in the layer's bucket
        within = at - starts[rank]  # in this rank's shard of it
        owned = whole[rank::ranks]
        k = len(owned)
        updated = Matrices(
            w=_layers(state.params, L, layer.start + at, layer.padded, n),
            low=None if low is None else _layers(low, L, layer.states["low"] + within, stride, n),
            m=_layers(state.m, L, layer.states["m"] + within, stride, n),
            g=_layers(sharding.reduced_gradients(state), L, grads + within, g_stride, n),
            x=_layers(whole, L, part.start, size, n),
            first=layer.first + at,
            distance=layer.length,
            momentum=momentum,
            decay=decay,
            scale=0.2 * math.sqrt(max(rows, columns)),
        )
        yield MatrixClass(
            updated, parts, whole, owned,
            next=state.orth_next[: k * rows * columns].view(k, rows, columns),
            gram=state.gram[: k * c * c].view(k, c, c), poly=state.poly[: k * c * c].view(k, c, c),
        )  # fmt: skip
        before += size


def _common(start: int, length: int, other: int, size: int) -> range:
    """Return the part that [start, +length) and [other, +size) share, counted from `other`."""
    first = min(max(start - other, 0), size)
    return range(first, max(first, min(start + length - other, size)))


def pieces(c: MatrixClass, rank: int, holder: int) -> Iterator[Tensor]:
    """Yield the contiguous pieces of the class's matrices that `rank`
    orthogonalises and `holder` updates.
    """
    flat = c.whole.view(-1)
    part = c.parts[holder]
    matrix = c.whole[0].numel()
    layer = flat.numel() // len(c.part.w)
    for i in range(rank, len(c.whole), len(c.parts)):
        l, at = divmod(i * matrix, layer)
        inside = _common(part.start, len(part), at, matrix)
        if inside:
            yield flat[l * layer + at :][inside.start : inside.stop]


def _layers(flat: Tensor, L: int, offset: int, distance: int, n: int) -> Tensor:
    """Return [L, n]: n elements of each layer, the first's at `offset`, others `distance` apart."""
    return flat.as_strided((L, n), (distance, 1), flat.storage_offset() + offset)
