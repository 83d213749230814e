"""Compares the launchers of an update, and of what surrounds it, with PyTorch."""

from collections.abc import Iterator

import torch
from torch import Tensor

import gpt2_triton.kernels as K
from benchmarks.accuracy.comparison import (
    BF16,
    DEVICE,
    F32,
    F64,
    Comparison,
    Sizes,
    beside,
    empty,
    empty32,
    randn,
    same,
    scratch,
    within,
)
from gpt2_triton.operands import Betas, Matrices, Span, Step

BETA1 = 0.9
BETA2 = 0.95
EPS = 1e-8
DECAY = 0.1
BETAS = Betas(BETA1, BETA2, EPS)
LR = 1e-3
MOMENTUM = 0.95
SCALE = 0.2


def reductions(s: Sizes) -> Iterator[Comparison]:
    g = randn(s.updated, dtype=F32)
    losses = 5 + randn(s.R, dtype=F32)
    stats = empty32(4)
    sumsq = empty32(1)
    step_in = torch.tensor([0, 0, 0, 1 / s.R, 1.0, 0, 0, 0], dtype=F32, device=DEVICE)
    K.loss_sum(stats[:1], losses, step_in)
    scale = step_in[K.step_io.LOSS_SCALE.value]
    K.sum_squares(sumsq, scratch(s), g)
    K.clip_factor(stats, sumsq, step_in)
    yield beside("loss_sum", "loss", stats[0], lambda x, scale: x.sum() * scale, losses, scale)
    yield beside("sum_squares", "sumsq", sumsq[0], squares, g)
    yield beside("clip_factor", "factor", stats[2], lambda g: 1 / (g.norm() + 1e-6), g)


def squares(x: Tensor) -> Tensor:
    return x.square().sum()


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
    m = torch.zeros(w.numel(), device=DEVICE)
    v = torch.zeros(w.numel(), device=DEVICE)
    stats = torch.tensor([0.0, 1.0, 1.0, 1.0], device=DEVICE)
    for t, g in enumerate(gradients, start=1):
        row = [lr, 1 / (1 - BETA1**t), 1 / (1 - BETA2**t), 1, 0, 0, 0, 0]
        step_in = torch.tensor(row, dtype=F32, device=DEVICE)
        step_key = torch.tensor([t, 1, 0, 0], dtype=torch.int32, device=DEVICE)
        K.adamw(Span(w, m, v, low, g, 0, 1.0, DECAY), Step(stats, step_in, step_key), BETAS)
    return m, v


def adamw(s: Sizes) -> Iterator[Comparison]:
    """Compare AdamW with torch: fp32, bf16 with master bits, and bf16 rounded
    stochastically (torch: to nearest).
    """
    w = randn(s.updated, scale=0.02, dtype=BF16)
    gradients = [randn(s.updated, dtype=F32) + 0.5 for _ in range(10)]
    single = torch_adamw(w, gradients, 1e-3, F32)
    exact = torch_adamw(w, gradients, 1e-3, F64)
    ours = (plain := w.float(), *our_adamw(plain, None, gradients, 1e-3))
    for name, a, b, c in zip(("w", "m", "v"), ours, single, exact, strict=True):
        yield Comparison("adamw fp32", name, a, b, c)
    high = w.clone()
    low = torch.zeros(s.updated, dtype=torch.int16, device=DEVICE)
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
    a = 3.5  # like the coefficients of POLAR_EXPRESS
    b = -2.5
    c = 0.5
    for M, N in ((s.C, s.C), (4 * s.C, s.C), (s.C, 4 * s.C)):
        op = f"muon {M}x{N}"
        x = randn(2, M, N)
        normal = empty(2, M, N)
        gram = empty(2, s.C, s.C)
        poly = empty(2, s.C, s.C)
        out = empty(2, M, N)

        def normalised(x: Tensor) -> Tensor:
            return x / (1.02 * torch.linalg.matrix_norm(x)[:, None, None])

        def smaller(x: Tensor) -> Tensor:
            return x.mT @ x if x.shape[1] > x.shape[2] else x @ x.mT

        def applied(x: Tensor, poly: Tensor) -> Tensor:
            return a * x + (x @ poly if x.shape[1] > x.shape[2] else poly @ x)

        K.muon_normalise(normal, empty32(K.muon_normalise_scratch(2, M, N)), x)
        yield beside(op, "normalised", normal, normalised, x.float())
        K.muon_gram(gram, normal)
        yield beside(op, "gram", gram, smaller, normal)
        yield same(op, "gram.T", gram, gram.mT.contiguous())
        K.muon_poly(poly, gram, b, c)
        yield beside(op, "poly", poly, lambda x: torch.baddbmm(x, x, x, beta=b, alpha=c), gram)
        K.muon_apply(out, normal, poly, a)
        yield beside(op, "applied", out, applied, normal, poly)


def master(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 weight that a bf16 parameter and its 16 master bits form."""
    lower = low.to(torch.int32) & 0xFFFF
    upper = (high.view(torch.int16).to(torch.int32) - (lower >= 0x8000).to(torch.int32)) << 16
    return (upper | lower).view(F32)


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F32, device=DEVICE)


def muon_update(s: Sizes) -> Iterator[Comparison]:
    """Compare momentum, update and statistics of the same elements of two layers, in fp32."""
    m, g, w = randn(3, 2, s.updated // 2, dtype=F32)
    x = empty(2, s.updated // 2)
    before = m.clone()
    step_out = row(0, 1, 1, 1, 0, 0)
    step_in = row(LR, 1, 1, 1, 0, 0, 0, 0)
    step_key = torch.tensor([1, 1, 0, 0], dtype=torch.int32, device=DEVICE)
    step = Step(step_out, step_in, step_key)
    updated = Matrices(w.clone(), None, m, g, x, 0, s.updated // 2, MOMENTUM, DECAY, SCALE)
    K.muon_momentum(updated, step)

    def mean(m: Tensor, g: Tensor) -> Tensor:
        return m * MOMENTUM + g * (1 - MOMENTUM)

    momentum = beside("muon_momentum", "m", m, mean, before, g)
    yield momentum
    ahead = mean(momentum.exact, g.double())
    yield Comparison("muon_momentum", "x", x, ahead.to(x.dtype), ahead)
    stats = empty32(5, K.stats_parts())
    K.muon_stats(stats, updated.part(0, slice(None)), step)
    K.muon_update(updated, step)
    stepped = beside(
        "muon_update", "w", updated.w, lambda w, x: w - LR * (SCALE * x + DECAY * w), w, x.float()
    )
    yield stepped
    yield from statistics("muon_stats", stats, g[0], w[0], stepped.exact[0] - w[0].double())


def statistics(op: str, stats: Tensor, g: Tensor, *tensors: Tensor) -> Iterator[Comparison]:
    """Compare partial results: squares, maximum, non-finite elements of g, and others' squares."""
    for i, tensor in [(0, g), *enumerate(tensors, start=3)]:
        single = squares(tensor.float())
        exact = squares(tensor.double())
        yield Comparison(op, f"squares {i}", stats[i].double().sum(), single, exact)
    yield same(op, "largest", stats[1].max(), g.float().abs().max())
    yield same(op, "not finite", 1 + stats[2].sum(), torch.ones_like(stats[2, 0]))


def adamw_stats(s: Sizes) -> Iterator[Comparison]:
    w, m, g = randn(3, s.updated, dtype=F32)
    v = randn(s.updated, dtype=F32).square()
    stats = empty32(5, K.stats_parts())
    of_x = empty32(3, K.stats_parts())
    x = randn(s.R, s.C)
    corrections = 1 / (1 - BETA1), 1 / (1 - BETA2)
    step_out = row(0, 1, 1, 1, 0, 0)
    step_in = row(LR, *corrections, 1, 0, 0, 0, 0)
    step = Step(step_out, step_in, row())  # the key is not read
    K.parameter_stats(stats, Span(w, m, v, None, g, 0, 1.0, DECAY), step, BETAS)
    m2 = BETA1 * m.double() + (1 - BETA1) * g.double()
    v2 = BETA2 * v.double() + (1 - BETA2) * g.double().square()
    update = LR * (m2 * corrections[0] / ((v2 * corrections[1]).sqrt() + EPS) + DECAY * w.double())
    yield from statistics("parameter_stats", stats, g, w, update)
    K.tensor_stats(of_x, x, False)
    yield from statistics("tensor_stats", of_x, x)


def outliers(s: Sizes) -> Iterator[Comparison]:
    window = randn(2, 129, dtype=F32)
    step_out = row(1.5, 2.5, 1, 1, 0, 0)
    z = empty32(2)
    window[:, -1] = 128  # as many values were seen: the next takes the first's place
    values = window[:, :-1].clone()
    values[:, 0] = step_out[:2]
    K.skip_outliers(step_out, window, z, row(0, 0, 0, 0, 0, 0, 2, 0))
    scores = beside(
        "skip_outliers",
        "z",
        z,
        lambda v: (v[:, 0] - v.mean(1)) / v.std(1, correction=0),
        values,
    )
    yield scores
    yield same("skip_outliers", "window", window[:, :-1], values)
    yield same("skip_outliers", "apply", 1 + step_out[3], 1 + (scores.exact[1] <= 2).float())


def filled(s: Sizes) -> Iterator[Comparison]:
    """Compare what is written without an input: constants, and normal numbers by their deciles."""
    w = empty32(s.updated)
    parts = randn(3, s.updated, dtype=F32)
    K.fill(w, 0.5)
    yield same("fill", "w", w, torch.full_like(w, 0.5))
    K.add_partials(w, parts)
    yield beside("add_partials", "out", w, lambda parts: 0.5 + parts.sum(0), parts)
    K.normal_init(w, None, 7, 0, 0.02)
    tenths = torch.arange(1, 10, device=DEVICE)
    deciles = w.sort().values[tenths * s.updated // 10]
    want = 0.02 * torch.special.ndtri(tenths.double() / 10)
    yield within("normal_init", "deciles", deciles, want, 4 / s.updated**0.5)


def comparisons(s: Sizes) -> Iterator[Comparison]:
    for check in (reductions, adamw, muon, muon_update, adamw_stats, outliers, filled):
        yield from check(s)
