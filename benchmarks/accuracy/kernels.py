"""Compares each launcher with PyTorch's own operation on the same input,
one function per operation.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
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
from gpt2_triton.data.packing import scatter_table

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
BETA1, BETA2, EPS, DECAY = 0.9, 0.95, 1e-8, 0.1
gelu = functools.partial(F.gelu, approximate="tanh")


def layernorm(s: Sizes) -> Iterator[Comparison]:
    (x, dout), w, b = randn(2, s.R, s.C), 1 + randn(s.C, scale=0.1), randn(s.C, scale=0.1)
    out, again, dx = empty(3, s.R, s.C)
    (mean, rstd), (dw, db, dbias) = empty32(2, s.R), empty32(3, s.C)
    K.layernorm_fwd(out, mean, rstd, x, w, b)
    K.layernorm_bwd(
        dx, None, dw, db, dbias, again, scratch(s), dout, x, w, b, mean, rstd, None, None, False
    )
    ours = dict(out=out, dx=dx, dw=dw, db=db, dbias=dbias)
    yield from compare(
        lambda x, w, b: F.layer_norm(x, (s.C,), w, b), (x, w, b), dout, ours, "layernorm"
    )
    yield same("layernorm", "out again", again, out)


def matmul(s: Sizes) -> Iterator[Comparison]:
    x, w, b, dout = (
        randn(s.R, s.C),
        randn(3 * s.C, s.C, scale=0.02),
        randn(3 * s.C),
        randn(s.R, 3 * s.C),
    )
    out, dinp, dw = empty(s.R, 3 * s.C), empty(s.R, s.C), empty32(3 * s.C, s.C)
    K.matmul(out, x, w, b)
    K.matmul_dx(dinp, dout, w)
    K.matmul_dw(dw, scratch(s), dout, x, False)
    yield from compare(F.linear, (x, w, b), dout, dict(out=out, dinp=dinp, dw=dw), "matmul")


def matmul_gelu(s: Sizes) -> Iterator[Comparison]:
    x, w, b = randn(s.R, s.C), randn(4 * s.C, s.C, scale=0.04), randn(4 * s.C)
    out, pre = empty(s.R, 4 * s.C), empty(s.R, 4 * s.C)
    K.matmul_gelu(out, pre, x, w, b)

    yield from compare(
        lambda x, w, b: gelu(F.linear(x, w, b)), (x, w, b), out, dict(out=out), "matmul_gelu"
    )
    w2, dout = randn(s.C, 4 * s.C, scale=0.02), randn(s.R, s.C)
    dpre, dbias, again = empty(s.R, 4 * s.C), empty32(4 * s.C), empty(s.R, 4 * s.C)
    K.matmul_dx_dgelu(dpre, dbias, again, scratch(s), dout, w2, pre, False)

    ours = dict(out=None, dpre=dpre, dbias=dbias)
    yield from compare(
        lambda pre: F.linear(gelu(pre), w2.to(pre.dtype)), (pre,), dout, ours, "matmul_dx_dgelu"
    )
    yield same("matmul_dx_dgelu", "gelu again", again, out)


def matmul_add(s: Sizes) -> Iterator[Comparison]:
    res, x, w, b, out = (
        randn(s.R, s.C),
        randn(s.R, s.C),
        randn(s.C, s.C, scale=0.04),
        randn(s.C),
        empty(s.R, s.C),
    )
    K.matmul_add(out, res, x, w, b)
    yield from compare(
        lambda r, x, w, b: r + F.linear(x, w, b), (res, x, w, b), out, dict(out=out), "matmul_add"
    )


def attention(s: Sizes) -> Iterator[Comparison]:
    C, NH, HS = s.C, s.NH, s.C // s.NH
    qkv, dout, dbias = randn(s.R, 3 * C), randn(s.R, C), empty32(3 * C)
    out, dqkv, lse, delta = (
        empty(s.R, C),
        empty(s.R, 3 * C),
        empty32(s.B, NH, s.T),
        empty32(s.B, NH, s.T),
    )
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


def scatter_tables(s: Sizes, ids: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the tables order, segments and split_tokens of a batch on the device."""
    tables = scatter_table(ids.flatten().cpu().numpy(), targets.flatten().cpu().numpy(), s.V)
    return [torch.from_numpy(table).to(DEVICE) for table in tables]


def tokens(s: Sizes) -> Tensor:
    """Return ids [B, T] with the frequencies of text: a few tokens are frequent, most are rare."""
    return torch.from_numpy(
        (np.random.default_rng(0).zipf(1.2, (s.B, s.T)) % s.V).astype(np.int32)
    ).to(DEVICE)


def classifier(s: Sizes) -> Iterator[Comparison]:
    lnf, wte, targets = randn(s.R, s.C), randn(s.Vp, s.C, scale=0.1), tokens(s).flatten()
    wte[s.V :], targets[5] = 0, -1
    step_in = torch.tensor([0, 0, 0, 1 / 4, 0, 0, 0, 0], dtype=F32, device=DEVICE)
    (zt, losses, rs, ks), dwte = empty32(4, s.R), empty32(s.Vp, s.C)
    p, lns, dln = empty(s.R, s.Vp), empty(s.R, s.C), empty(s.R, s.C)
    K.classifier_target(zt, lnf, wte, targets)
    K.classifier_fwd(p, scratch(s), lnf, wte, zt, targets, s.V)
    K.classifier_loss(losses, rs, ks, lns, scratch(s), lnf, targets, step_in, False)
    K.classifier_dx(dln, p, wte, rs, ks, targets)
    K.matmul_dw(dwte, scratch(s), p, lns, False)
    tables = scatter_tables(s, tokens(s), targets)
    K.embedding_bwd(
        dwte, empty32(s.T, s.C), scratch(s), torch.zeros_like(lnf), lnf, ks, *tables, s.T, False
    )

    def function(lnf: Tensor, wte: Tensor) -> Tensor:
        logits = F.linear(lnf, wte[: s.V])
        # autocast also computes the loss in fp32
        wide = logits.to(torch.promote_types(logits.dtype, F32))
        return F.cross_entropy(wide, targets.long(), ignore_index=-1, reduction="none")

    ours = dict(losses=losses, dln=dln, dwte=dwte)
    yield from compare(function, (lnf, wte), torch.full_like(losses, 1 / 4), ours, "classifier")


def embedding(s: Sizes) -> Iterator[Comparison]:
    ids, wte, wpe, dx = tokens(s), randn(s.Vp, s.C), randn(s.T, s.C), randn(s.R, s.C)
    x, dwte, dwpe = empty(s.R, s.C), torch.zeros(s.Vp, s.C, device=DEVICE), empty32(s.T, s.C)
    K.embedding_fwd(x, ids, wte, wpe)
    tables = scatter_tables(s, ids, torch.full_like(ids, -1))
    K.embedding_bwd(
        dwte, dwpe, scratch(s), dx, dx, torch.zeros(s.R, device=DEVICE), *tables, s.T, False
    )

    def function(wte: Tensor, wpe: Tensor) -> Tensor:
        return (F.embedding(ids.long(), wte) + wpe).view(s.R, s.C)

    yield from compare(function, (wte, wpe), dx, dict(x=x, dwte=dwte, dwpe=dwpe), "embedding")
    yield same("embedding", "x as torch", x, function(wte, wpe))


def reductions(s: Sizes) -> Iterator[Comparison]:
    g, losses, stats, sumsq = (
        randn(s.updated, dtype=F32),
        5 + randn(s.R, dtype=F32),
        empty32(4),
        empty32(1),
    )
    step_in = torch.tensor([0, 0, 0, 1 / s.R, 1.0, 0, 0, 0], dtype=F32, device=DEVICE)
    K.loss_sum(stats[:1], losses, step_in)
    scale = step_in[K.step_io.LOSS_SCALE.value]
    K.sum_squares(sumsq, scratch(s), g)
    K.clip_factor(stats, sumsq, step_in)
    yield Comparison(
        "loss_sum", "loss", stats[0], losses.sum() * scale, losses.double().sum() * scale.double()
    )
    yield Comparison("sum_squares", "sumsq", sumsq[0], g.square().sum(), g.double().square().sum())
    yield Comparison(
        "clip_factor", "factor", stats[2], 1 / (g.norm() + 1e-6), 1 / (g.double().norm() + 1e-6)
    )


def torch_adamw(
    w: Tensor, gradients: list[Tensor], lr: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Run torch.optim.AdamW in `dtype` and return w, m and v."""
    leaf = w.to(dtype, copy=True).requires_grad_()
    optimizer = torch.optim.AdamW([leaf], lr=lr, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    for g in gradients:
        leaf.grad = g.to(dtype)
        optimizer.step()
    state = optimizer.state[leaf]
    return leaf.detach(), state["exp_avg"], state["exp_avg_sq"]


def our_adamw(
    w: Tensor, low: Tensor | None, gradients: list[Tensor], lr: float
) -> tuple[Tensor, Tensor]:
    """Run K.adamw in place on w (and low) and return m and v."""
    m, v = torch.zeros(w.numel(), device=DEVICE), torch.zeros(w.numel(), device=DEVICE)
    stats = torch.tensor([0.0, 1.0, 1.0, 1.0], device=DEVICE)
    for t, g in enumerate(gradients, start=1):
        row = [lr, 1 / (1 - BETA1**t), 1 / (1 - BETA2**t), 1, 0, 0, 0, 0]
        step_in = torch.tensor(row, dtype=F32, device=DEVICE)
        step_key = torch.tensor([t, 1, 0, 0], dtype=torch.int32, device=DEVICE)
        K.adamw(w, m, v, low, g, stats, step_in, step_key, 0, DECAY, 1.0, BETA1, BETA2, EPS)
    return m, v


def adamw(s: Sizes) -> Iterator[Comparison]:
    """Compare AdamW with torch: fp32, bf16 with master bits, and bf16 rounded
    stochastically (torch: to nearest).
    """
    w, gradients = (
        randn(s.updated, scale=0.02, dtype=BF16),
        [randn(s.updated, dtype=F32) + 0.5 for _ in range(10)],
    )
    single, exact = torch_adamw(w, gradients, 1e-3, F32), torch_adamw(w, gradients, 1e-3, F64)
    ours = (plain := w.float(), *our_adamw(plain, None, gradients, 1e-3))
    for name, a, b, c in zip(("w", "m", "v"), ours, single, exact, strict=True):
        yield Comparison("adamw fp32", name, a, b, c)
    high, low = w.clone(), torch.zeros(s.updated, dtype=torch.int16, device=DEVICE)
    our_adamw(high, low, gradients, 1e-3)
    yield Comparison("adamw master", "w", master(high, low), single[0], exact[0])
    yield Comparison("adamw master", "w bf16", high, exact[0].to(BF16), exact[0])
    # updates of 1e-5 are a tenth of bf16's spacing at 0.02, so compare means over 1024 weights
    rounded = w.clone()
    our_adamw(rounded, None, gradients, 1e-5)
    results = (
        rounded,
        torch_adamw(w, gradients, 1e-5, BF16)[0],
        torch_adamw(w, gradients, 1e-5, F64)[0],
    )
    a, b, c = ((result.double() - w.double()).view(-1, 1024).mean(1) for result in results)
    yield Comparison("adamw bf16", "mean update", a, b, c)


def muon(s: Sizes) -> Iterator[Comparison]:
    """Compare the products of Muon with torch in the same dtype, for two matrices of each shape."""
    b, c, a = -2.5, 0.5, 3.5  # like the coefficients of POLAR_EXPRESS
    for M, N in ((s.C, s.C), (4 * s.C, s.C), (s.C, 4 * s.C)):
        op, x = f"muon {M}x{N}", randn(2, M, N)
        normal, gram, poly, out = (
            empty(2, M, N),
            empty(2, s.C, s.C),
            empty(2, s.C, s.C),
            empty(2, M, N),
        )

        def norms(x: Tensor) -> Tensor:
            return 1.02 * torch.linalg.matrix_norm(x)[:, None, None]

        def smaller(x: Tensor) -> Tensor:
            return x.mT @ x if x.shape[1] > x.shape[2] else x @ x.mT

        def applied(x: Tensor, poly: Tensor) -> Tensor:
            return a * x + (x @ poly if x.shape[1] > x.shape[2] else poly @ x)

        K.muon_normalise(normal, empty32(K.muon_normalise_scratch(2, M, N)), x)
        yield Comparison(
            op,
            "normalised",
            normal,
            (x.float() / norms(x.float())).to(x.dtype),
            x / norms(x.double()),
        )
        K.muon_gram(gram, normal)
        yield Comparison(op, "gram", gram, smaller(normal), smaller(normal.double()))
        yield same(op, "gram.T", gram, gram.mT.contiguous())
        K.muon_poly(poly, gram, b, c)
        wide = gram.double()
        yield Comparison(
            op,
            "poly",
            poly,
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c),
            b * wide + c * wide @ wide,
        )
        K.muon_apply(out, normal, poly, a)
        yield Comparison(
            op, "applied", out, applied(normal, poly), applied(normal.double(), poly.double())
        )


def master(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 weight that a bf16 parameter and its 16 master bits form."""
    lower = low.to(torch.int32) & 0xFFFF
    upper = (high.view(torch.int16).to(torch.int32) - (lower >= 0x8000).to(torch.int32)) << 16
    return (upper | lower).view(F32)


def comparisons(s: Sizes) -> Iterator[Comparison]:
    for check in (
        layernorm,
        matmul,
        matmul_gelu,
        matmul_add,
        attention,
        embedding,
        reductions,
        adamw,
        muon,
    ):
        yield from check(s)
    for HS in (80, 96, 128):
        yield from attention(dataclasses.replace(s, NH=1, C=HS))
    yield from classifier(dataclasses.replace(s, B=1))
