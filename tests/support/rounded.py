"""Gradients in plain PyTorch with the operands of the layers' products rounded to e4m3: what fp8
costs by rounding alone.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.support import torch_reference


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return x in e4m3 with a power of two as scale, which leaves a factor of
    two to the largest number.
    """
    scale = torch.exp2(torch.floor(torch.log2(224.0 / x.abs().amax().clamp(min=1e-30))))
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


class RoundedLinear(torch.autograd.Function):
    """x w^T + b and its gradients, each operand of a product rounded to e4m3."""

    @staticmethod
    def forward(ctx, x, w, b):
        x, w = rounded(x), rounded(w)
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        g = rounded(dy)
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return g @ w, g.flatten(0, -2).T @ x.flatten(0, -2), db


def rounded_gradients(
    params: torch.Tensor, dims: dict[str, int], table: type, loss: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients in fp32 of loss(leaves, linear=...), which computes the layers'
    products by `linear`; params is the flat buffer of a model whose tensors `table` names.
    """
    leaves: Any = torch_reference.leaves(params, dims, torch.float32, table)
    loss(leaves, linear=lambda _, *operands: RoundedLinear.apply(*operands)).backward()
    return {name: leaf.grad for name, leaf, _ in torch_reference.tensors(leaves, dims)}
