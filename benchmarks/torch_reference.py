"""GPT-2 in plain PyTorch with autograd, on the project's flat parameters: the reference for the schedule.

Functional, for any dtype.  Losses and gradients have the project's scale: a mean is the sum over tokens with a target,
divided by all B*T tokens, so that micro-batches with ignored targets add up.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_triton.model.buffers import Params, param_entries, param_views


def leaves(flat: Tensor, dims: dict[str, int], dtype: torch.dtype | None = None) -> Params:
    """Return leaf tensors, copies of the parts of a flat buffer in the project's order."""

    def leaf(view: Tensor) -> Tensor:
        return view.detach().to(dtype or view.dtype, copy=True).requires_grad_()

    views = vars(param_views(flat, dims))
    return Params(**{name: [leaf(t) for t in v] if isinstance(v, list) else leaf(v) for name, v in views.items()})


def tensors(params: Params, dims: dict[str, int]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, has weight decay) in the flat order; layer tensors are called name[layer]."""
    for e in param_entries(dims):
        value = getattr(params, e.name)
        yield (e.name, value, e.decay) if e.layer is None else (f"{e.name}[{e.layer}]", value[e.layer], e.decay)


def _attention(qkv: Tensor, NH: int) -> Tensor:
    B, T, _ = qkv.shape
    q, k, v = (t.view(B, T, NH, -1).transpose(1, 2) for t in qkv.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)


def _linear(layer: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def gpt2_loss(
    params: Params, ids: Tensor, targets: Tensor, V: int, NH: int, reduction: Literal["none", "mean"] = "mean",
    linear: Callable[[str, Tensor, Tensor, Tensor], Tensor] = _linear,
) -> Tensor:  # fmt: skip
    """Return the cross entropy over the first V rows of wte (the rest is padding).  A target of -1 has no loss, but
    counts in the mean.  `linear` computes the products of the layers: it gets a layer's name, x, w and b.
    """
    p, C = params, params.wte.shape[1]

    def norm(x: Tensor, i: int) -> Tensor:
        return F.layer_norm(x, (C,), p.lnw[i], p.lnb[i])

    x = F.embedding(ids.long(), p.wte) + p.wpe[: ids.shape[1]]
    for l in range(len(p.qkvw)):
        att = _attention(linear("qkv", norm(x, 2 * l), p.qkvw[l], p.qkvb[l]), NH)
        x = x + linear("attproj", att, p.attprojw[l], p.attprojb[l])
        h = F.gelu(linear("fc", norm(x, 2 * l + 1), p.fcw[l], p.fcb[l]), approximate="tanh")
        x = x + linear("fcproj", h, p.fcprojw[l], p.fcprojb[l])
    logits = F.linear(norm(x, 2 * len(p.qkvw)), p.wte[:V]).flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten().long(), ignore_index=-1, reduction="none")
    return losses if reduction == "none" else losses.sum() / targets.numel()


def train(
    params: Params, dims: dict[str, int], batches: Iterable[tuple[Tensor, Tensor]], lrs: Iterable[float], *,
    betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1, clip: float = 1.0,
    embed_lr: float = 1.0,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Update `params` with AdamW and clipping by global norm, one step per batch; return losses and norms.

    `embed_lr` is a factor on the learning rate of wte and wpe.
    """
    listed = list(tensors(params, dims))
    embedding = dict(params=[params.wte, params.wpe], weight_decay=weight_decay)
    matrices = dict(params=[t for name, t, decay in listed if decay and "[" in name], weight_decay=weight_decay)
    others = dict(params=[t for _, t, decay in listed if not decay], weight_decay=0.0)
    optimizer = torch.optim.AdamW([embedding, matrices, others], betas=betas, eps=eps)
    losses, norms = [], []
    for (ids, targets), lr in zip(batches, lrs, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.param_groups[0]["lr"] = embed_lr * lr
        loss = gpt2_loss(params, ids, targets, dims["V"], dims["NH"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([t for _, t, _ in listed], clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms
