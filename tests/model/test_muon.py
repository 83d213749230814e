"""Muon's polynomials against their derivation; its updates against PyTorch's in float64; what it needs and keeps."""

import math

import numpy as np
import pytest
import torch

import gpt2_triton.kernels as kernels
from benchmarks import torch_reference
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.errors import ConfigError
from gpt2_triton.model import sharding
from gpt2_triton.model.memory_plan import plan_memory
from gpt2_triton.model.muon import LOWEST, POLAR_EXPRESS
from gpt2_triton.training.lr_schedule import step_inputs
from tests.conftest import DEVICE
from tests.model.test_lifetimes import recorded_step, violations
from tests.support.helpers import max_error
from tests.support.models import EXACT, batches, exact_model, train_steps
from tests.support.tiny import packed_batch, tiny_config, tiny_model


def best_quintic(low: float, high: float) -> np.ndarray:
    """Return a, b, c of the odd quintic with the least largest distance from 1 on [low, high] (Remez's algorithm).

    The distance takes its largest value, with alternating sign, at both ends and at the two extrema between them.
    """
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    for _ in range(60):
        s = np.array([low, *inner, high])
        a, b, c, _ = np.linalg.solve(np.stack([s, s**3, s**5, [1, -1, 1, -1]], 1), np.ones(4))
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * math.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
    return np.array([a, b, c])


def value(row, s):
    a, b, c = row
    return a * s + b * s**3 + c * s**5


def test_polynomials_are_those_of_polar_express():
    """Each is the best on the interval that remains, but for one that does not shrink below 0.0241 of its upper end,
    from where its distances at the ends differ and it is scaled to balance them.  All but the last take s / 1.01.
    """
    low, high, rows = LOWEST, 1.0, []
    for _ in POLAR_EXPRESS:
        row = best_quintic(max(low, 0.02407327424182761 * high), high)
        row *= 2 / (value(row, low) + value(row, high))
        rows.append(row)
        low = value(row, low)
        high = 2 - low
    safe = [row / 1.01 ** np.array([1, 3, 5]) for row in rows[:-1]] + rows[-1:]
    np.testing.assert_allclose(POLAR_EXPRESS, safe, rtol=1e-9)


def test_singular_values_from_a_thousandth_to_one_become_nearly_one():
    s = np.geomspace(1e-3, 1, 100_001) / 1.02
    for row in POLAR_EXPRESS:
        s = value(row, s)
    assert 0.85 < s.min() and s.max() < 1.15


@pytest.mark.parametrize("s", [0.0, 1e-6])
def test_smaller_singular_values_grow_but_do_not_pass_one(s):
    got = s
    for row in POLAR_EXPRESS:
        got = value(row, got)
    assert s * 800 <= got <= 1


# ---- the update of a step ----

MUON = dict(name="muon", lr=0.01, clip=0.5, embed_lr=2.0)


def muon_step(matrices, momenta, lr, decay, momentum=0.95):
    """Update matrices in place as Muon does, by the textbook: Nesterov's momentum, then the polynomials as powers."""
    for w, m in zip(matrices, momenta, strict=True):
        m.mul_(momentum).add_(w.grad, alpha=1 - momentum)
        x = momentum * m + (1 - momentum) * w.grad
        x = x / (1.02 * x.norm())
        for a, b, c in POLAR_EXPRESS:
            x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
        w.sub_(lr * (0.2 * max(w.shape) ** 0.5 * x + decay * w))


def test_three_updates_equal_those_of_pytorch():
    """Autograd, clipping, torch's AdamW for embedding, norms and biases, and q, k, v orthogonalised apart."""
    model = exact_model(train=EXACT["train"] | dict(total_batch_tokens=16), optim=MUON)
    d, o, params = model.dims, model.config.optim, torch_reference.leaves(model.state.params, model.dims)
    got = train_steps(model, 3)
    listed = list(torch_reference.tensors(params, d))
    inner = [w for name, w, decay in listed if decay and "[" in name]
    other = [w for name, w, decay in listed if not decay]
    groups = [dict(params=[params.wte, params.wpe], lr=2 * o.lr, weight_decay=o.weight_decay)]
    adamw = torch.optim.AdamW([*groups, dict(params=other, weight_decay=0)], lr=o.lr, betas=(0.9, 0.95), eps=o.eps)
    momenta = [torch.zeros_like(w) for w in inner]
    for step in range(3):
        (ids, targets), *_ = batches(model.config, 1, seed=step)
        loss = torch_reference.gpt2_loss(params, ids, targets, d["V"], d["NH"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([w for _, w, _ in listed], o.clip)
        # lr and bias corrections are float32, 6e-8 relative, and reach the next gradient through the weights
        assert got[step][:2] == pytest.approx((loss.item(), norm.item()), rel=1e-5), step
        with torch.no_grad():
            for w, m in zip(inner, momenta, strict=True):
                heads = 3 if w.shape[0] == 3 * w.shape[1] else 1
                parts, grads = w.detach().chunk(heads), w.grad.chunk(heads)
                for part, grad in zip(parts, grads, strict=True):
                    part.grad = grad
                muon_step(parts, m.chunk(heads), o.lr, o.weight_decay)
        adamw.step()
        for _, w, _ in listed:
            w.grad = None
    ours = {name: w for name, w, _ in torch_reference.tensors(model.train_view.w, d)}
    for name, leaf, _ in listed:
        assert max_error(ours[name], leaf.detach()) < 1e-5, name


def test_every_launch_stays_inside_live_buffers(monkeypatch):
    model, launches = recorded_step("gelu", monkeypatch, optim=dict(name="muon"))
    assert sum(name == "muon_apply" for _, name, *_ in launches) == 15
    assert violations(model, launches) == []


@pytest.mark.slow
def test_tiny_model_learns_one_batch_with_the_same_bits_each_time():
    ends = []
    for _ in range(2):
        model, config = tiny_model(
            model=dict(n_layer=1), train=dict(dtype="bf16"), optim=dict(name="muon", lr=0.02, master="fp32")
        )
        batch, losses = packed_batch(config).to(DEVICE), []
        for step in range(3):
            model.begin_step(step_inputs(step, config, 1 / 32), step, 1)
            model.micro_step(batch, first=True)
            losses.append(model.end_step().result().loss)
        ends.append((losses, model.state_digest()))
    assert ends[0] == ends[1]
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.5


def test_state_loaded_from_a_checkpoint_continues_with_the_same_bytes():
    first, second = exact_model(optim=MUON), exact_model(optim=MUON)
    train_steps(first, 1)
    saved = {name: torch.cat([part.flatten() for part in parts]) for name, parts in first.local_shards().items()}
    assert {name: t.numel() for name, t in saved.items()} == {n: t.numel() for n, t in first.checkpoint_spec().items()}
    second.load({name: t.view(first.checkpoint_spec()[name].shape) for name, t in saved.items()})
    for model in (first, second):
        train_steps(model, 1)
    assert first.state_digest() == second.state_digest()
    assert not torch.equal(saved["v"], torch.cat([part.flatten() for part in first.local_shards()["v"]]))


def test_skipped_step_changes_no_byte_of_the_state():
    model = exact_model(optim=MUON)
    train_steps(model, 1)
    before = model.state_digest()
    model.begin_step(step_inputs(1, model.config, float("nan")), 1, 1)
    model.micro_step(packed_batch(model.config), first=True)
    assert not model.end_step().result().applied
    assert model.state_digest() == before


# ---- memory ----


def recipe(size, name, **train):
    return Config.model_validate(dict(model=dict(size=size), optim=dict(name=name), train=train))


@pytest.mark.parametrize("size, batch, recompute", [("d12", 64, "gelu"), ("d48", 16, "gelu+ln"), ("d48", 1, "block")])
def test_plan_needs_no_byte_more_than_without_the_second_moments(size, batch, recompute):
    """At micro-batches that fill a GPU, what Muon works in lies in the bytes of activations."""
    plans = []
    for name in ("adamw", "muon"):
        config = recipe(size, name, batch_size=batch).replace(memory=dict(recompute=recompute))
        plan, dims = plan_memory(config, kernels, batch, 1024)
        plans.append(plan.total)
    matrices = 12 * dims["L"] * dims["C"] ** 2
    assert dims["No"] == matrices and dims["Nv"] == dims["N"] - matrices
    if batch > 1:
        assert plans[0] - plans[1] == pytest.approx(4 * matrices, abs=4096)
    else:
        assert plans[1] <= plans[0]


@pytest.mark.parametrize("zero", (0, 1, 2))
@pytest.mark.parametrize("ranks", (1, 2, 3, 7))
def test_second_moments_are_those_of_embedding_norms_and_biases(ranks, zero):
    dims = dict(L=3, C=48, Vp=128, Tmax=10, S=7, ranks=ranks, zero=zero if ranks > 1 else 0)
    dims |= sharding.flat_buffer_sizes(dims, True, True, muon=True)
    for rank in range(ranks):
        end = 0
        for p in (p for p in sharding.owned_shards(dims, rank) if p.second is not None):
            assert p.bucket in (0, 4) and p.second >= end
            end = p.second + p.length
        assert end <= dims["Nv"]


# ---- the configuration ----


def test_muon_on_several_gpus_is_refused():
    with pytest.raises(ConfigError, match="optim.name: muon runs on one GPU, got 2; start one"):
        StepShape.of(tiny_config(optim=dict(name="muon")), 2)
