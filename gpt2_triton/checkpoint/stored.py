"""The tensors of a checkpoint, read span by span from the files of its ranks.

The files are mapped: opening them reads their headers, and elements are read when they are used.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_triton.checkpoint.format import Spans
from gpt2_triton.errors import CheckpointError


class Piece(NamedTuple):
    """Contiguous elements of a tensor, all in one file."""

    first: int  # flat index
    elements: Tensor


class StoredTensor(NamedTuple):
    """A tensor in pieces, in the order of their flat indices."""

    where: str  # names it in errors
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].elements.dtype

    def span(self, first: int, length: int) -> Iterator[Piece]:
        """Yield what there is of `length` elements from flat index `first` on;
        CheckpointError for a NaN.
        """
        for piece in self.pieces:
            begin = max(first - piece.first, 0)
            end = min(first + length - piece.first, len(piece.elements))
            if begin < end:
                elements = piece.elements[begin:end]
                if not _is_finite(elements):
                    raise CheckpointError(
                        f"{self.where} has a NaN or an infinity; "
                        "remove this step and use an older one"
                    )
                yield Piece(piece.first + begin, elements)

    def read(self, first: int, length: int) -> Tensor:
        """Return elements [length] from flat index `first` on: a view of the file that
        has them all, else a copy.
        """
        found = list(self.span(first, length))
        if len(found) == 1:
            return found[0].elements
        joined = torch.empty(length, dtype=self.dtype)
        for piece in found:
            begin = piece.first - first
            joined[begin : begin + len(piece.elements)].copy_(piece.elements)
        return joined


def _is_finite(elements: Tensor) -> bool:
    if not elements.is_floating_point():
        return True
    lowest, highest = elements.aminmax()  # 20 times as fast as isfinite of each element
    return bool(lowest.isfinite() and highest.isfinite())


def whole_tensors(where: str, tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return tensors that are in one file or in memory."""
    return {
        name: StoredTensor(f"{where}: {name}", tuple(tensor.shape), [Piece(0, tensor.view(-1))])
        for name, tensor in tensors.items()
    }


def join_shards(
    where: str,
    shards: Sequence[Mapping[str, Tensor]],
    spans: Sequence[Spans],
    second: Sequence[Spans],
) -> dict[str, StoredTensor]:
    """Return the tensors of several ranks; one that only rank 0 has is whole.

    Each rank's tensors in `shards` have the elements of its `spans` one after the
    other, v those of its `second`.
    """
    joined = whole_tensors(where, shards[0])
    for name in shards[0].keys() & shards[-1].keys():
        by_rank = second if name == "v" else spans
        pieces = [
            piece
            for shard, own in zip(shards, by_rank, strict=True)
            for piece in _cut(shard[name], own)
        ]
        pieces.sort(key=lambda piece: piece.first)
        size = sum(len(piece.elements) for piece in pieces)
        joined[name] = StoredTensor(joined[name].where, (size,), pieces)
    return joined


def _cut(shard: Tensor, spans: Spans) -> Iterator[Piece]:
    lengths = [length for _, length in spans]
    for (first, _), elements in zip(spans, shard.split(lengths), strict=True):
        yield Piece(first, elements)
