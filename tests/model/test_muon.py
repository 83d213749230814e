"""Muon's polynomials against their derivation; its updates against PyTorch's in
float64; what it needs and keeps.
"""

import math

import numpy as np
import pytest
import torch

import gpt2_triton.kernels as kernels
from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.checkpoint.stored import join_shards
from gpt2_triton.commands.compile import absent_ranks
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.model.memory_plan import plan_memory
from gpt2_triton.model.model import Model
from gpt2_triton.model.muon import LOWEST, POLAR_EXPRESS
from gpt2_triton.model.sharding import NOT_A_LAYER, buckets
from gpt2_triton.training.lr_schedule import step_inputs
from tests.support import ranks, reference, torch_reference
from tests.support.checkpoints import load_checkpoint, whole
from tests.support.models import (
    EXACT,
    F64,
    batches,
    exact_model,
    gpt2_loss,
    leaves_of,
    require_close,
    train_steps,
)
from tests.support.tiny import tiny_config


def best_quintic(low: float, high: float) -> np.ndarray:
    """Return a, b, c of the odd quintic with the least largest distance from 1 on
    [low, high] (Remez's algorithm).

    The distance takes its largest value, with alternating sign, at both ends and at
    the two extrema between them.
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
    """Each is the best on the interval that remains, but for one that does not shrink below 0.0241
    of its upper end, from where its distances at the ends differ and it is scaled to balance them.
    All but the last take s / 1.01.
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


# ---- the update of a step ----

MUON = dict(name="muon", lr=0.01, clip=0.5, embed_lr=2.0)


def muon_step(matrices, momenta, lr, decay):
    """Update matrices in place as Muon does, by the textbook: Nesterov's momentum, then
    the polynomials as powers.
    """
    for w, m in zip(matrices, momenta, strict=True):
        m.mul_(0.95).add_(w.grad, alpha=0.05)
        x = 0.95 * m + 0.05 * w.grad
        x = x / (1.02 * x.norm())
        for a, b, c in POLAR_EXPRESS:
            x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
        w.sub_(lr * (0.2 * max(w.shape) ** 0.5 * x + decay * w))


@pytest.mark.slow
def test_two_updates_equal_those_of_pytorch():
    """With torch's AdamW for the rest; q, k, v are apart; momentum moves once in
    a step of two micro-steps.
    """
    model = exact_model(optim=MUON | dict(tau=0.03, adamw_lr=0.004, embed_decay=0.5))
    assert model.shape.accumulation == 2
    o, params = model.config.optim, leaves_of(model)
    got = train_steps(model, 2)
    listed = list(torch_reference.tensors(params, model.dims))
    inner = [w for name, w, decay in listed if decay and "[" in name]
    other = [w for name, w, decay in listed if not decay]
    groups = [dict(params=[params.wte, params.wpe], lr=2 * o.adamw_lr, weight_decay=0.5)]
    groups += [dict(params=other, lr=o.adamw_lr, weight_decay=0)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=o.eps)
    momenta = [torch.zeros_like(w) for w in inner]
    for step in range(2):
        two = batches(model.config, 2, seed=step)
        loss = sum(gpt2_loss(model, params, *batch) for batch in two) / 2
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([w for _, w, _ in listed], o.clip)
        # lr and bias corrections are float32, 6e-8 relative, and reach the next
        # gradient through the weights
        assert got[step][:2] == pytest.approx((loss.item(), norm.item()), rel=1e-5), step
        with torch.no_grad():
            for w, m in zip(inner, momenta, strict=True):
                heads = 3 if w.shape[0] == 3 * w.shape[1] else 1
                parts, grads = w.detach().chunk(heads), w.grad.chunk(heads)
                for part, grad in zip(parts, grads, strict=True):
                    part.grad = grad
                muon_step(parts, m.chunk(heads), o.lr, model.config.weight_decay)
        adamw.step()
        for _, w, _ in listed:
            w.grad = None
    require_close(model, model.train_view.w, params, 1e-5)


# ---- memory ----


def recipe(size, name, **train):
    return Config.model_validate(dict(model=dict(size=size), optim=dict(name=name), train=train))


@pytest.mark.parametrize(
    "size, batch, recompute", [("d12", 64, "gelu"), ("d48", 16, "gelu+ln"), ("d48", 1, "block")]
)
def test_plan_needs_no_byte_more_than_without_the_second_moments(size, batch, recompute):
    """At micro-batches that fill a GPU, what Muon works in lies in the bytes of activations."""
    plans = []
    for name in ("adamw", "muon"):
        config = recipe(size, name, batch_size=batch).replace(memory=dict(recompute=recompute))
        plan, dims = plan_memory(config, kernels, StepShape.of(config))
        plans.append(plan.total)
    matrices = 12 * dims["L"] * dims["C"] ** 2
    assert dims["No"] == matrices and dims["Nv"] == dims["N"] - matrices
    if batch > 1:
        assert plans[0] - plans[1] == pytest.approx(4 * matrices, abs=4096)
    else:
        assert plans[1] <= plans[0]


# ---- several ranks ----

COUNTERS = ("skipped", "outliers", "skipped_in_a_row", "without_update", "rewinds")
REST = ("lnw", "lnb", "qkvb", "attprojb", "fcb", "fcprojb")
ONE = None  # instead of a group: a single rank
WAYS = [(zero, shared) for zero in (0, 1, 2) for shared in (True, False)]


def test_flat_indices_of_matrices_leave_the_padding_out():
    """A rank's first elements of a layer have the rounding noise of a single rank's."""
    train = dict(batch_size=1, seq_len=8, total_batch_tokens=40)
    config = tiny_config(model=EXACT["model"], train=train, optim=MUON, parallel=dict(zero=1))
    group = absent_ranks(5)
    group.rank = 1
    model = Model(config, reference, "cpu", group=group)
    layers = buckets(model.dims)[1:-1]
    assert len(layers) > 1 and layers[0].length < layers[0].padded
    params = model.state.params
    for c in model.train_view.matrices:
        for l, layer in enumerate(layers):
            at = c.part.w[l].storage_offset() - params.storage_offset()
            assert c.part.first + l * c.part.distance == layer.first + at - layer.start


def write_gradients(model, tensors, seed, micro, add):
    """Set or add small random integers on one rank, by micro-step another, zeros on
    others: all sums are exact.
    """
    generator = torch.Generator().manual_seed(seed)
    for g in tensors:
        found = torch.randint(-3, 4, g.shape, generator=generator) * (
            model.rank == micro % model.dims["ranks"]
        )
        g.copy_(found + g if add else found)


def backward(model, step, micro):
    """Write the gradients of one of two micro-steps where a backward pass writes them,
    and send them as it does.
    """
    view, L, seed = model.train_view, model.dims["L"], 100 * step + 10 * micro
    view.a.losses.zero_()
    view.a.losses[0] = float(model.rank == 0)
    view.comm.begin_micro_step(micro == 0, micro == 1)
    for l in reversed(range(L)):
        view.comm.wait_grad_buffer(l)
        matrices = (view.g.qkvw[l], view.g.attprojw[l], view.g.fcw[l], view.g.fcprojw[l])
        write_gradients(model, matrices, seed + l, micro, micro == 1 and not view.grads_sharded)
        if l == 0:
            rest = (view.g.wte, view.g.wpe, *(getattr(view.g, name) for name in REST))
            write_gradients(model, rest, seed + L, micro, micro == 1)
            view.comm.reduce_grads(NOT_A_LAYER)
        view.comm.reduce_grads(l)
    view.comm.end_micro_step()


def after_two_updates(zero, group):
    """Return what this rank saves after two updates of two micro-steps each,
    as arrays, and its spans.
    """
    train = dict(batch_size=6, seq_len=8, total_batch_tokens=48)
    config = tiny_config(model=EXACT["model"], train=train, optim=MUON, parallel=dict(zero=zero))
    model = Model(config, reference, "cpu", dtypes=F64, group=group)
    model.arena.zero_()
    model.state.params[: model.dims["Vp"] * model.dims["C"]] = 0.1
    for step in range(2):
        model.begin_step(step_inputs(step, config), step, 1)
        for micro in range(2):
            backward(model, step, micro)
        assert model.end_step().result().applied
    model.comm.gather_params()
    flat = {
        name: torch.cat([part.flatten() for part in parts])
        for name, parts in model.saved.shards().items()
    }
    return (
        {name: t.numpy() for name, t in flat.items()},
        model.saved.spans(),
        model.comm.__class__.__name__,
    )


def in_every_way(directory):
    """Return `after_two_updates` for each of WAYS; save the state of the last one."""
    group, out = ProcessGroup("cpu", 60), []
    for zero, shared in WAYS:
        group.single_node = shared
        out.append(after_two_updates(zero, group))
    flat, spans, _ = out[-1]
    state = dict(sample=0, config={}, data=[]) | dict.fromkeys(COUNTERS, 0) | spans
    # checkpoints have no float64
    tensors = {name: torch.from_numpy(t).float() for name, t in flat.items()}
    save_checkpoint(directory, 2, tensors, state, Retention(0), control=group.control("saving"))
    group.close()
    return out


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which a process with CUDA may not")
@pytest.mark.parametrize("n", [2, 3])
def test_ranks_give_the_bytes_of_one_rank_for_equal_sums_of_gradients(tmp_path, n):
    """At every ZeRO stage, by copies and by collectives: matrices are whole, and
    momentum moves once a step.
    """
    want, _, _ = after_two_updates(0, ONE)
    for way, of_ranks in zip(
        WAYS,
        zip(*ranks.run(n, tmp_path / "stderr", in_every_way, tmp_path), strict=True),
        strict=True,
    ):
        assert {name for *_, name in of_ranks} == {
            "PeerCopyCommunicator" if way[1] else "NcclCommunicator"
        }
        shards = [{name: torch.from_numpy(t) for name, t in flat.items()} for flat, *_ in of_ranks]
        spans, second = ([s[key] for _, s, _ in of_ranks] for key in ("shares", "second_shares"))
        assert len(want["v"]) == sum(length for own in second for _, length in own)
        for name, tensor in join_shards("", shards, spans, second).items():
            assert np.array_equal(whole(tensor).numpy(), want[name]), (way, name)
    saved = load_checkpoint(find_checkpoint(tmp_path))[1]
    assert saved.keys() == want.keys()
    assert all(np.array_equal(saved[name].numpy(), want[name].astype(np.float32)) for name in want)
