"""Products of PyTorch whose operands are rounded to e4m3, forward and backward, to tell which rounding costs loss.

y = x w^T + b, dx = dy w, dw = dy^T x, with x (activations), w (weights) and dy (gradients) rounded or not; a rounded
operand is the same in both of its products.  A scale is the largest power of two with which twice the largest number of
the tensor is at most 448, as kernels/fp8.py's, but of this tensor, not of earlier steps.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.torch_gpt2 import GPT2
from gpt2_triton.errors import ConfigError

KINDS = ("weights", "activations", "gradients")
LAYERS = ("qkv", "attproj", "fc", "fcproj")
LARGEST = 224.0  # half of e4m3's


def kinds_of(option: str, text: str) -> list[str]:
    """Return the kinds of a comma-separated list, each perhaps of one layer as in qkv.activations; [] for `none`.
    ConfigError for any other.
    """
    known = {*KINDS, *(f"{layer}.{kind}" for layer in LAYERS for kind in KINDS)}
    words = [] if text == "none" else text.split(",")
    if wrong := [word for word in words if word not in known]:
        expected = f"{', '.join(KINDS)}, one of a layer as in qkv.activations, or none"
        raise ConfigError(f"{option}: got {wrong[0]!r}, expected {expected}")
    return words


def of_layer(kinds: Collection[str], layer: str) -> list[str]:
    return [kind for kind in KINDS if kind in kinds or f"{layer}.{kind}" in kinds]


def rounded(x: Tensor) -> Tensor:
    """Return x with the values that e4m3 has; a tensor of zeros is returned as it is."""
    scale = torch.exp2(torch.floor(torch.log2(LARGEST / x.abs().amax().float().clamp(min=1e-30))))
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, kinds: Collection[str]) -> Tensor:  # type: ignore[override]
        x = rounded(x) if "activations" in kinds else x
        w = rounded(w) if "weights" in kinds else w
        ctx.save_for_backward(x, w)
        ctx.kinds = kinds
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        g = rounded(dy) if "gradients" in ctx.kinds else dy
        return g @ w, g.flatten(0, -2).T @ x.flatten(0, -2), dy.flatten(0, -2).sum(0), None


def linear(kinds: Collection[str]) -> Callable[[str, Tensor, Tensor, Tensor], Tensor]:
    """Return the product of a layer, x, w and b, with operands of these kinds rounded."""

    def product(layer: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        found: Tensor = _Product.apply(x, w, b, of_layer(kinds, layer))
        return found

    return product


class RoundedLinear(nn.Module):
    """A linear layer in bf16 with operands of some kinds rounded."""

    def __init__(self, linear: nn.Linear, kinds: Collection[str]):
        super().__init__()
        self.weight, self.bias, self.kinds = linear.weight, linear.bias, kinds

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Product.apply(*(t.to(torch.bfloat16) for t in (x, self.weight, self.bias)), self.kinds)
        return found


def round_operands(model: GPT2, kinds: Collection[str]) -> None:
    """Replace the linear layers of the model's blocks by ones whose operands of these kinds are rounded."""
    for block in model.layers:
        for name in LAYERS:
            setattr(block, name, RoundedLinear(getattr(block, name), of_layer(kinds, name)))
