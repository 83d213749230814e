"""Compares the launchers of Llama's layers and of decoding with PyTorch."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import gpt2_triton.kernels as K
from benchmarks.accuracy.comparison import (
    DEVICE,
    Comparison,
    Sizes,
    compare,
    empty,
    empty32,
    randn,
    same,
    scratch,
)
from gpt2_triton.model.llama import rope
from gpt2_triton.operands import NARROW_ROWS, Branch, HeadNorm, Linear, Norm, Rope

EPS = 1e-5
NARROW, WIDE = 4, 48  # sequences: above 16 they go through tensor cores


def rmsnorm(s: Sizes) -> Iterator[Comparison]:
    x, dout = randn(2, s.R, s.C)
    w = 1 + randn(s.C, scale=0.1)
    out, again, dx = empty(3, s.R, s.C)
    rstd = empty32(s.R)
    dw = empty32(s.C)
    norm = Norm(w, rstd=rstd, dw=dw, eps=EPS)
    K.layernorm_fwd(out, norm, x)
    K.layernorm_bwd(dx, norm, Branch(), again, scratch(s), dout, x, None, False)
    ours = dict(out=out, dx=dx, dw=dw)
    yield from compare(lambda x, w: F.rms_norm(x, (s.C,), w, EPS), (x, w), dout, ours, "rmsnorm")
    yield same("rmsnorm", "out again", again, out)


def rotation(s: Sizes) -> Tensor:
    """Return cosines and sines of T positions."""
    return torch.from_numpy(rope.table(s.T, s.C // s.NH, 5e5, 1.0)).to(DEVICE)


def turned(qkv: Tensor, w: Tensor | None, table: Tensor, s: Sizes) -> Tensor:
    """Return qkv with the heads of q and k normed, if there are weights w, and rotated."""
    qk, v = qkv.split([2 * s.C, s.C], 1)
    heads = qk.view(s.B, s.T, 2, s.NH, -1)
    if w is not None:
        heads = F.rms_norm(heads, heads.shape[-1:], eps=EPS) * w[:, None]
    first, last = heads.chunk(2, -1)
    wide = torch.promote_types(qk.dtype, torch.float32)
    cos, sin = table[:, None, None].to(wide).chunk(2, -1)
    both = torch.cat([first * cos - last * sin, last * cos + first * sin], -1)
    return torch.cat([both.view(s.R, -1).to(v.dtype), v], 1)


def rotated_product(s: Sizes) -> Iterator[Comparison]:
    """Compare a product whose first two thirds of columns, q and k, are rotated."""
    x = randn(s.R, s.C)
    w = randn(3 * s.C, s.C, scale=0.04)
    out = empty(s.R, 3 * s.C)
    table = rotation(s)
    K.matmul_rope(out, x, Linear(w), Rope(table, s.T, 2 * s.C))
    yield from compare(
        lambda x, w: turned(F.linear(x, w), None, table, s),
        (x, w),
        out,
        dict(out=out),
        "matmul_rope",
    )


def head_norms(s: Sizes) -> Iterator[Comparison]:
    """Compare a product whose q and k are normed and rotated, and attention's way back."""
    x, dout = randn(2, s.R, s.C)
    w = randn(3 * s.C, s.C, scale=0.04)
    table = rotation(s)
    weights = 1 + randn(2, s.C // s.NH, scale=0.1)
    att = empty(s.R, s.C)
    qkv, dqkv = empty(2, s.R, 3 * s.C)
    rstd = empty32(s.R, 2 * s.NH)
    dw = empty32(*weights.shape)
    lse, delta = empty32(2, s.B, s.NH, s.T)
    given = Rope(table, s.T, 2 * s.C, HeadNorm(weights, rstd, dw, s.NH, EPS))
    K.matmul_rope(qkv, x, Linear(w), given)
    yield from compare(
        lambda x, w: turned(F.linear(x, w), weights, table, s),
        (x, w),
        qkv,
        dict(out=qkv),
        "matmul_rope, normed",
    )
    K.attention_fwd(att, lse, qkv)
    K.attention_bwd(dqkv, None, delta, scratch(s), dout, qkv, att, lse, False, given)

    def function(before: Tensor, weights: Tensor) -> Tensor:
        after = turned(before, weights, table, s)
        q, k, v = (t.view(s.B, s.T, s.NH, -1).transpose(1, 2) for t in after.chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return found.transpose(1, 2).reshape(s.R, s.C)

    ours = dict(out=att, dqkv=dqkv, dw=dw)
    yield from compare(function, (F.linear(x, w), weights), dout, ours, "attention, normed")


def gated(pre: Tensor) -> Tensor:
    gate, value = pre.chunk(2, -1)
    return F.silu(gate) * value


def swiglu(s: Sizes) -> Iterator[Comparison]:
    x = randn(s.R, s.C)
    w = randn(8 * s.C, s.C, scale=0.04)
    dout = randn(s.R, 4 * s.C)
    out, again = empty(2, s.R, 4 * s.C)
    pre, dpre = empty(2, s.R, 8 * s.C)
    K.matmul_swiglu(out, pre, x, Linear(w))
    K.swiglu(again, pre)
    K.swiglu_bwd(dpre, dout, pre)
    yield from compare(
        lambda x, w: gated(F.linear(x, w)), (x, w), out, dict(out=out), "matmul_swiglu"
    )
    yield same("swiglu", "again", again, out)
    yield from compare(gated, (pre,), dout, dict(out=again, dpre=dpre), "swiglu")


def sequences(count: int, row: int) -> Tensor:
    """Return seq: token, row in the cache, tokens sampled, two halves of the seed."""
    seq = torch.zeros(count, 5, dtype=torch.int32, device=DEVICE)
    seq[:, 0], seq[:, 1] = torch.arange(count), row
    return seq


def decoded_rows(s: Sizes) -> Iterator[Comparison]:
    for count in (NARROW, WIDE):
        seq = sequences(count, s.T - 1)
        wte = randn(s.Vp, s.C)
        wpe = randn(s.T, s.C)
        x = empty(count, s.C)
        K.decode_embed(x, seq, wte, wpe)
        yield same("decode_embed", "x", x, wte[:count] + wpe[s.T - 1])
        w = randn(4 * s.C, s.C, scale=0.04)
        b = randn(4 * s.C)
        res = randn(count, 4 * s.C)
        norm = (1 + randn(s.C, scale=0.1), randn(s.C)) if count <= NARROW_ROWS else ()
        out = empty(count, 4 * s.C)
        K.decode_matmul(out, x, Linear(w, b), Norm(*norm) if norm else None, res, "gelu")

        def function(x: Tensor, w: Tensor, b: Tensor, res: Tensor, *norm: Tensor) -> Tensor:
            inp = F.layer_norm(x, (s.C,), norm[0], norm[1]) if norm else x
            return res + F.gelu(F.linear(inp, w, b), approximate="tanh")

        yield from compare(function, (x, w, b, res, *norm), out, dict(out=out), "decode_matmul")
        logits = randn(count, s.Vp, dtype=torch.float32)
        most_likely = logits[:, : s.V].argmax(1).float()
        K.sample_token(seq, logits, s.V, 0.0, 0, 1.0)
        yield same("sample_token", "most likely", seq[:, 0].float(), most_likely)


def decoded_attention(s: Sizes) -> Iterator[Comparison]:
    """Compare the last of T tokens, the others' keys and values in the cache."""
    C = s.C
    before = randn(s.T, 3 * s.C)
    new = randn(NARROW, 3 * s.C)
    cache = empty(NARROW, s.T, 2, C)
    att = empty(NARROW, C)
    K.cache_fill(cache, before, torch.ones(NARROW, dtype=torch.int32, device=cache.device))
    yield same("cache_fill", "cache", cache[-1].reshape(s.T, 2 * C), before[:, C:])
    K.decode_attention(att, cache, new, sequences(NARROW, s.T - 1), s.NH)
    yield same("decode_attention", "cache", cache[:, -1].reshape(NARROW, 2 * C), new[:, C:])

    def function(new: Tensor) -> Tensor:
        rows = torch.cat([before[:-1].to(new.dtype).expand(NARROW, -1, -1), new[:, None]], 1)
        q, k, v = (t.view(NARROW, s.T, s.NH, -1).transpose(1, 2) for t in rows.chunk(3, -1))
        return F.scaled_dot_product_attention(q[:, :, -1:], k, v).reshape(NARROW, C)

    yield from compare(function, (new,), att, dict(att=att), "decode_attention")


def comparisons(s: Sizes) -> Iterator[Comparison]:
    for check in (rmsnorm, rotated_product, head_norms, swiglu, decoded_rows, decoded_attention):
        yield from check(s)
