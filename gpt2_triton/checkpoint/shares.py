"""The tensors of a checkpoint from the shares that several ranks wrote."""

import torch
from torch import Tensor

Spans = list[list[int]]  # [flat index, elements] of each stretch that a rank's file holds, in the file's order


def tile(shares: list[Spans]) -> int | None:
    """The number of elements that the ranks' spans cover, each once and without gaps; None if they do not."""
    end = 0
    for first, length in sorted((first, length) for spans in shares for first, length in spans if length):
        if first != end or length < 0:
            return None
        end += length
    return end


def join(parts: list[dict[str, Tensor]], shares: list[Spans]) -> dict[str, Tensor]:
    """Whole host tensors from each rank's; what only rank 0 has is whole already."""
    total, out = tile(shares), {}
    assert total is not None, "the spans were checked before"
    for name, tensor in parts[0].items():
        if len(parts) > 1 and name not in parts[1]:
            out[name] = tensor
            continue
        out[name] = torch.empty(total, dtype=tensor.dtype)
        for part, spans in zip(parts, shares, strict=True):
            at = 0
            for first, n in spans:
                out[name][first : first + n].copy_(part[name][at : at + n])
                at += n
    return out
