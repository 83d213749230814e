"""Compares the launchers of GPT-2's layers and head with PyTorch's own operations,
one function per operation.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt2_triton.kernels as K
from benchmarks.accuracy.comparison import (
    DEVICE,
    F32,
    Comparison,
    Sizes,
    compare,
    empty,
    empty32,
    randn,
    same,
    scratch,
    within,
)
from benchmarks.activations import ACTIVATIONS
from gpt2_triton.data.packing import scatter_table
from gpt2_triton.operands import Branch, Dropout, Linear, Norm, Targets, TokenRows


def layernorm(s: Sizes) -> Iterator[Comparison]:
    x, dout = randn(2, s.R, s.C)
    w = 1 + randn(s.C, scale=0.1)
    b = randn(s.C, scale=0.1)
    out, again, dx = empty(3, s.R, s.C)
    mean, rstd = empty32(2, s.R)
    dw, db, dbias = empty32(3, s.C)
    norm = Norm(w, b, mean, rstd, dw, db)
    K.layernorm_fwd(out, norm, x)
    K.layernorm_bwd(dx, norm, Branch(dbias), again, scratch(s), dout, x, None, False)
    ours = dict(out=out, dx=dx, dw=dw, db=db, dbias=dbias)
    yield from compare(
        lambda x, w, b: F.layer_norm(x, (s.C,), w, b), (x, w, b), dout, ours, "layernorm"
    )
    yield same("layernorm", "out again", again, out)


def matmul(s: Sizes) -> Iterator[Comparison]:
    x = randn(s.R, s.C)
    w = randn(3 * s.C, s.C, scale=0.02)
    b = randn(3 * s.C)
    dout = randn(s.R, 3 * s.C)
    out = empty(s.R, 3 * s.C)
    dinp = empty(s.R, s.C)
    dw = empty32(3 * s.C, s.C)
    K.matmul(out, x, Linear(w, b))
    K.matmul_dx(dinp, dout, Linear(w))
    K.matmul_dw(dw, scratch(s), dout, x, False)
    yield from compare(F.linear, (x, w, b), dout, dict(out=out, dinp=dinp, dw=dw), "matmul")


def activations(s: Sizes) -> Iterator[Comparison]:
    for act in ACTIVATIONS:
        yield from matmul_act(s, act)


def matmul_act(s: Sizes, act: str) -> Iterator[Comparison]:
    function = ACTIVATIONS[act]
    x = randn(s.R, s.C)
    w = randn(4 * s.C, s.C, scale=0.04)
    b = randn(4 * s.C)
    out = empty(s.R, 4 * s.C)
    pre = empty(s.R, 4 * s.C)
    K.matmul_act(out, pre, x, Linear(w, b), act)
    yield from compare(
        lambda x, w, b: function(F.linear(x, w, b)), (x, w, b), out, dict(out=out), f"matmul_{act}"
    )
    w2 = randn(s.C, 4 * s.C, scale=0.02)
    dout = randn(s.R, s.C)
    dpre = empty(s.R, 4 * s.C)
    dbias = empty32(4 * s.C)
    again = empty(s.R, 4 * s.C)
    K.matmul_dx_dact(dpre, dbias, again, scratch(s), dout, Linear(w2), pre, False, act)
    ours = dict(out=None, dpre=dpre, dbias=dbias)
    op = f"matmul_dx_d{act}"
    yield from compare(
        lambda pre: F.linear(function(pre), w2.to(pre.dtype)), (pre,), dout, ours, op
    )
    yield same(op, f"{act} again", again, out)


def matmul_add(s: Sizes) -> Iterator[Comparison]:
    res = randn(s.R, s.C)
    x = randn(s.R, s.C)
    w = randn(s.C, s.C, scale=0.04)
    b = randn(s.C)
    out = empty(s.R, s.C)
    K.matmul_add(out, res, x, Linear(w, b))
    yield from compare(
        lambda r, x, w, b: r + F.linear(x, w, b), (res, x, w, b), out, dict(out=out), "matmul_add"
    )


def attention(s: Sizes) -> Iterator[Comparison]:
    C = s.C
    NH = s.NH
    HS = s.C // s.NH
    qkv = randn(s.R, 3 * C)
    dout = randn(s.R, C)
    dbias = empty32(3 * C)
    out = empty(s.R, C)
    dqkv = empty(s.R, 3 * C)
    lse = empty32(s.B, NH, s.T)
    delta = empty32(s.B, NH, s.T)
    K.attention_fwd(out, lse, qkv)
    K.attention_bwd(dqkv, dbias, delta, scratch(s), dout, qkv, out, lse, False)

    def function(qkv: Tensor) -> Tensor:
        q, k, v = (t.view(s.B, s.T, NH, HS).transpose(1, 2) for t in qkv.chunk(3, -1))
        return (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(s.R, C)
        )

    yield from compare(
        function, (qkv,), dout, dict(out=out, dqkv=dqkv, dbias=dbias), f"attention HS {HS}"
    )


def token_rows(s: Sizes, ids: Tensor, targets: Tensor) -> TokenRows:
    """Return the tables of a batch on the device."""
    tables = scatter_table(ids.flatten().cpu().numpy(), targets.flatten().cpu().numpy(), s.V)
    order, segments, split_tokens = (torch.from_numpy(table).to(DEVICE) for table in tables)
    return TokenRows(order, segments, split_tokens, s.T)


def tokens(s: Sizes) -> Tensor:
    """Return ids [B, T] with the frequencies of text: a few tokens are frequent, most are rare."""
    return torch.from_numpy(
        (np.random.default_rng(0).zipf(1.2, (s.B, s.T)) % s.V).astype(np.int32)
    ).to(DEVICE)


def classifier(s: Sizes, cap: float) -> Iterator[Comparison]:
    lnf = randn(s.R, s.C)
    wte = randn(s.Vp, s.C, scale=0.1)
    targets = tokens(s).flatten()
    wte[s.V :], targets[5] = 0, -1
    step_in = torch.tensor([0, 0, 0, 1 / 4, 0, 0, 0, 0], dtype=F32, device=DEVICE)
    zt, losses, rs, ks = empty32(4, s.R)
    dwte = empty32(s.Vp, s.C)
    p = empty(s.R, s.Vp)
    lns = empty(s.R, s.C)
    dln = empty(s.R, s.C)
    predicted = Targets(targets, zt, cap)
    K.classifier_target(predicted, lnf, wte)
    K.classifier_fwd(p, scratch(s), lnf, wte, predicted, s.V)
    K.classifier_loss(losses, rs, ks, lns, scratch(s), lnf, predicted, step_in, False)
    K.classifier_dx(dln, p, wte, rs, ks, targets)
    K.matmul_dw(dwte, scratch(s), p, lns, False)
    rows = token_rows(s, tokens(s), targets)
    K.embedding_bwd(
        dwte, empty32(s.T, s.C), scratch(s), torch.zeros_like(lnf), lnf, ks, rows, False
    )

    def function(lnf: Tensor, wte: Tensor) -> Tensor:
        logits = F.linear(lnf, wte[: s.V])
        # autocast also computes the loss in fp32
        wide = logits.to(torch.promote_types(logits.dtype, F32))
        if cap:
            wide = cap * torch.tanh(wide / cap)
        return F.cross_entropy(wide, targets.long(), ignore_index=-1, reduction="none")

    ours = dict(losses=losses, dln=dln, dwte=dwte)
    op = "capped classifier" if cap else "classifier"
    yield from compare(function, (lnf, wte), torch.full_like(losses, 1 / 4), ours, op)


def embedding(s: Sizes) -> Iterator[Comparison]:
    ids = tokens(s)
    wte = randn(s.Vp, s.C)
    wpe = randn(s.T, s.C)
    dx = randn(s.R, s.C)
    x = empty(s.R, s.C)
    dwte = torch.zeros(s.Vp, s.C, device=DEVICE)
    dwpe = empty32(s.T, s.C)
    K.embedding_fwd(x, ids, wte, wpe)
    rows = token_rows(s, ids, torch.full_like(ids, -1))
    K.embedding_bwd(dwte, dwpe, scratch(s), dx, dx, torch.zeros(s.R, device=DEVICE), rows, False)

    def function(wte: Tensor, wpe: Tensor) -> Tensor:
        return (F.embedding(ids.long(), wte) + wpe).view(s.R, s.C)

    yield from compare(function, (wte, wpe), dx, dict(x=x, dwte=dwte, dwpe=dwpe), "embedding")
    yield same("embedding", "x as torch", x, function(wte, wpe))


def dropout(s: Sizes) -> Iterator[Comparison]:
    """Drop a quarter; elements of ones show which."""
    x = randn(s.R, s.C)
    res = randn(s.R, s.C)
    kept = torch.ones_like(empty(s.R, s.C))
    step_key = torch.tensor([3, 1, 0, 0], dtype=torch.int32, device=DEVICE)
    quarter = Dropout(step_key, 1, 0.25)
    K.dropout(kept, None, quarter)
    out = x.clone()
    mask = kept > 0
    K.dropout(out, res, quarter)
    share = mask.double().mean()
    deviation = (0.25 / 0.75 / mask.numel()) ** 0.5  # of the share, relative
    yield within("dropout", "share kept", share, torch.full_like(share, 0.75), 5 * deviation)
    yield from compare(
        lambda x, res: res + x * mask * (4 / 3), (x, res), x, dict(out=out), "dropout"
    )


def comparisons(s: Sizes) -> Iterator[Comparison]:
    for check in (layernorm, matmul, activations, matmul_add, attention, embedding, dropout):
        yield from check(s)
    for HS in (80, 96, 128):
        yield from attention(dataclasses.replace(s, NH=1, C=HS))
    for cap in (0.0, 2.0):
        yield from classifier(dataclasses.replace(s, B=1), cap)
