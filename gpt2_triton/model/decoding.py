"""Decoding: its buffers, and the launches that write a text's keys and values and draw tokens."""

import dataclasses

from torch import Tensor

from gpt2_triton.model.arena import buf
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model_view import Layers
from gpt2_triton.model.schedule import View, final_norm
from gpt2_triton.model.tables import Tensors
from gpt2_triton.operands import NARROW_ROWS, Linear


# fmt: off
@dataclasses.dataclass
class Decoding:
    """Buffers of decoding.  The backward pass may overwrite them: no text goes
    on after a training step.
    """

    # keys, values
    cache:  Tensors = buf("L | Bd T 2 Ckv", "act", "embed block head between", "decoding")
    logits: Tensor  = buf("Bl Vp",        "f32", "embed block head between", "decoding")
    # see kernels/decode.py
    seq:    Tensor  = buf("Bd 5",         "i32", "embed block head between", "decoding")
    # 1 for each sequence that a prefill is for
    filled: Tensor  = buf("Bd",           "i32", "embed block head between", "decoding")
# fmt: on


def product_of_norm(K: Kernels, m: View, out: Tensor, i: int, layer: Linear, act: str = "") -> None:
    """out = act(norm(x[i]) @ w.T + b); the norm of many rows is written to ln[i]."""
    x = m.a.x[i]
    norm = m.net.norms[i]
    if len(x) > NARROW_ROWS:
        K.layernorm_fwd(m.a.ln[i], norm, x)
        K.decode_matmul(out, m.a.ln[i], layer, None, None, act)
    else:
        K.decode_matmul(out, x, layer, norm, None, act)


def prefill(K: Kernels, layers: Layers, m: View, d: Decoding) -> None:
    """Write the keys and values of m.ids, one sequence, into the cache where d.filled is 1."""
    layers.embed(K, m)
    for l in range(m.L):
        layers.layer(K, m, l)
        K.cache_fill(d.cache[l], m.a.qkv[l], d.filled)
        layers.last_product(K, m, l)


def decode(K: Kernels, layers: Layers, m: View, d: Decoding) -> None:
    """Take the last token of each sequence of d.seq through the layers, as one row."""
    a = m.a
    K.decode_embed(a.x[0], d.seq, m.net.embedding.wte, m.net.embedding.wpe)
    for l, net in enumerate(m.net.layers):
        i = 2 * l
        # qkv = norm(x[i]) @ w.T; x[i+1] = x[i] + attproj(att); x[i+2] = x[i+1] + fcproj(fcg)
        product_of_norm(K, m, a.qkv[l], i, net.qkv)
        K.decode_attention(a.att[l], d.cache[l], a.qkv[l], d.seq, m.NH, net.rope)
        K.decode_matmul(a.x[i + 1], a.att[l], net.attproj, None, a.x[i])
        layers.decode_mlp(K, m, l)
        K.decode_matmul(a.x[i + 2], a.fcg[l], net.fcproj, None, a.x[i + 1])


def sample(
    K: Kernels,
    layers: Layers,
    m: View,
    d: Decoding,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """Sample the next token of each sequence of d.seq among the first `tokens`; each sequence's
    last token goes through the model as one row.
    """
    decode(K, layers, m, d)
    # separately: each of the head's 3144 programs would have to normalise its input again
    final_norm(K, m)
    logits = d.logits[: len(d.seq)]
    K.decode_matmul(logits, m.a.lnf, m.net.head, cap=m.targets.cap)
    K.sample_token(d.seq, logits, tokens, temperature, top_k, top_p)
