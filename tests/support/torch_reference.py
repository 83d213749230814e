"""GPT-2 and Llama 3 in plain PyTorch with autograd, on the project's flat
parameters: the schedules' reference.

The functions take any dtype.  As in the project, a mean loss is the sum over tokens with a
target, divided by the number of all tokens, B*T.  Gradients of micro-batches can therefore be
added, even where targets are ignored.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.activations import ACTIVATIONS
from gpt2_triton.model.gpt2.buffers import Params
from gpt2_triton.model.tables import param_entries, param_views


def leaves(
    flat: Tensor, dims: dict[str, int], dtype: torch.dtype | None = None, table: type = Params
) -> Any:
    """Return copies of a flat buffer's parts as leaf tensors, in the project's order."""

    def leaf(view: Tensor) -> Tensor:
        return view.detach().to(dtype or view.dtype, copy=True).requires_grad_()

    views = vars(param_views(table, flat, dims))
    return table(
        **{
            name: [leaf(t) for t in v] if isinstance(v, list) else leaf(v)
            for name, v in views.items()
            if v is not None
        }
    )


def tensors(params: Any, dims: dict[str, int]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, has weight decay) in the order of the flat buffer; layer
    tensors are called name[layer].
    """
    for e in param_entries(type(params), dims):
        value = getattr(params, e.name)
        decays = e.bucket <= dims["L"]  # not norms and biases
        yield (
            (e.name, value, decays)
            if e.layer is None
            else (f"{e.name}[{e.layer}]", value[e.layer], decays)
        )


def _linear(name: str, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b)


def _attention(qkv: Tensor, NH: int) -> Tensor:
    B, T, _ = qkv.shape
    q, k, v = (t.view(B, T, NH, -1).transpose(1, 2) for t in qkv.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)


def gpt2_loss(
    params: Params, ids: Tensor, targets: Tensor, V: int, NH: int,
    reduction: Literal["none", "mean"] = "mean",
    linear: Callable[[str, Tensor, Tensor, Tensor], Tensor] = _linear,
    dropout: Callable[[int, Tensor], Tensor] = lambda i, x: x, act: str = "gelu",
) -> Tensor:  # fmt: skip
    """Return the cross entropy over V tokens; further rows of wte are padding.  A target of -1 has
    no loss, but counts in the mean.  `linear` computes a product of the layers from its name, x, w
    and b.  `dropout` takes i and the tensor that is added to the residual stream at point i.
    """
    p, C = params, params.wte.shape[1]

    def norm(x: Tensor, i: int) -> Tensor:
        return F.layer_norm(x, (C,), p.lnw[i], p.lnb[i])

    x = dropout(0, F.embedding(ids.long(), p.wte) + p.wpe[: ids.shape[1]])
    for l in range(len(p.qkvw)):
        att = _attention(linear("qkv", norm(x, 2 * l), p.qkvw[l], p.qkvb[l]), NH)
        x = x + dropout(2 * l + 1, linear("attproj", att, p.attprojw[l], p.attprojb[l]))
        h = ACTIVATIONS[act](linear("fc", norm(x, 2 * l + 1), p.fcw[l], p.fcb[l]))
        x = x + dropout(2 * l + 2, linear("fcproj", h, p.fcprojw[l], p.fcprojb[l]))
    return _cross_entropy(norm(x, 2 * len(p.qkvw)), p.wte[:V], targets, reduction)


def llama_loss(
    params: Any, ids: Tensor, targets: Tensor, V: int, NH: int, rope: Tensor, eps: float,
    linear: Callable[[str, Tensor, Tensor, None], Tensor] = _linear, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return Llama 3's cross entropy, as gpt2_loss; `rope` has the cosines
    and sines of each position.  A `cap` that is not 0 is of the logits.
    """
    p, (B, T) = params, ids.shape
    C, HS = p.wte.shape[1], rope.shape[1]
    cos, sin = rope[:T].chunk(2, -1)

    def norm(x: Tensor, i: int) -> Tensor:
        return F.rms_norm(x, (C,), p.lnw[i], eps)

    def head_norm(x: Tensor, l: int, of_k: int) -> Tensor:
        return x if p.qknormw is None else F.rms_norm(x, x.shape[-1:], p.qknormw[l, of_k], eps)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)

    x = F.embedding(ids.long(), p.wte)
    for l in range(len(p.qkvw)):
        qkv = linear("qkv", norm(x, 2 * l), p.qkvw[l], None).view(B, T, -1, HS).transpose(1, 2)
        q, k, v = qkv.split([NH, *[(qkv.shape[1] - NH) // 2] * 2], 1)
        q = rotate(head_norm(q, l, 0))
        k = rotate(head_norm(k, l, 1))
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        att = att.transpose(1, 2).reshape(B, T, -1)
        x = x + linear("attproj", att, p.attprojw[l], None)
        gate, up = linear("fc", norm(x, 2 * l + 1), p.fcw[l], None).chunk(2, -1)
        x = x + linear("fcproj", F.silu(gate) * up, p.fcprojw[l], None)
    return _cross_entropy(
        norm(x, 2 * len(p.qkvw)), getattr(p, "lmhead", p.wte)[:V], targets, "mean", cap
    )


def _cross_entropy(
    x: Tensor, w: Tensor, targets: Tensor, reduction: str, cap: float = 0.0
) -> Tensor:
    logits = F.linear(x, w).flatten(0, 1)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, targets.flatten().long(), ignore_index=-1, reduction="none")
    return losses if reduction == "none" else losses.sum() / targets.numel()
