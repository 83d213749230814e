"""The mathematics of the schedule: the reference launchers against autograd, in float64."""

import functools

import numpy as np
import pytest
import torch

from benchmarks.activations import ACTIVATIONS
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.model.gpt2.buffers import Params
from tests.support import torch_reference
from tests.support.helpers import max_error
from tests.support.models import (
    EXACT,
    batches,
    exact_model,
    gpt2_loss,
    leaves_of,
    require_close,
    require_decoding_equals_the_forward,
    require_gradients,
    train_steps,
)


def model_of(level: str, act: str, **changes: dict):
    return exact_model(level, model=EXACT["model"] | dict(activation=act), **changes)


@functools.cache
def autograd_step(act: str) -> tuple[float, Params]:
    """Return the loss of the model's first step, and its parameters with their gradients."""
    model = model_of("none", act)
    params = leaves_of(model)
    loss = sum(gpt2_loss(model, params, *two, act=act) for two in batches(model.config, 2)) / 2
    loss.backward()
    return loss.item(), params


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_loss_and_gradients_equal_autograd(level, act):
    model = model_of(level, act)
    assert [r.stop - r.start for r in model.train_view.head_chunks] == [6, 6, 4]
    assert model.shape.accumulation == 2
    train_steps(model, 1)
    want, params = autograd_step(act)
    # float64 costs 1e-16 per operation; sums here have up to 512 terms, and 40
    # operations follow one another
    loss, norm = model.state.step_out[:2].tolist()
    assert abs(loss - want) < 1e-12 * want
    require_gradients(model, params)
    listed = torch_reference.tensors(params, model.dims)
    want = torch.cat([leaf.grad.flatten() for _, leaf, _ in listed]).norm().item()
    assert abs(norm - want) < 1e-11 * want


def test_three_updates_equal_torch_adamw():
    """Decay on matrices only, bias correction, clipping, the embedding's rate: losses,
    norms, and the last weights.
    """
    optim = dict(lr=0.01, clip=0.5, embed_lr=2.0, tau=0.03)
    model = exact_model(train=EXACT["train"] | dict(total_batch_tokens=16), optim=optim)
    o, params = model.config.optim, leaves_of(model)
    got = train_steps(model, 3)
    listed = list(torch_reference.tensors(params, model.dims))
    groups = [
        dict(params=[params.wte, params.wpe], lr=o.embed_lr * o.lr),
        dict(params=[t for name, t, decay in listed if decay and "[" in name]),
        dict(params=[t for _, t, decay in listed if not decay], weight_decay=0.0),
    ]
    given = dict(betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=model.config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=o.lr, **given)
    losses, norms = [], []
    for step in range(3):
        loss = gpt2_loss(model, params, *batches(model.config, 1, seed=step)[0])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_([t for _, t, _ in listed], o.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # lr and bias corrections are float32, 6e-8 relative, and reach the next
    # gradient through the weights
    np.testing.assert_allclose([loss for loss, _, _ in got], losses, rtol=1e-6)
    np.testing.assert_allclose([norm for _, norm, _ in got], norms, rtol=1e-6)
    assert min(norms) > o.clip  # clipping did happen
    require_close(model, model.train_view.w, params, 1e-6)


def test_evaluation_equals_autograd_in_a_smaller_view():
    """The losses of 1 x 5 tokens in the arena of 2 x 8."""
    model = exact_model()
    ids, targets = (t[:1, :5].contiguous() for t in batches(model.config, 1)[0])
    targets[0, 2], targets[0, 4] = -1, 7
    losses = model.evaluate(ids.numpy(), targets.numpy())
    want = gpt2_loss(model, leaves_of(model), ids, targets, reduction="none")
    assert max_error(losses, want.detach()) < 1e-12 and losses[2] == 0


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_decoding_equals_the_training_forward(level, act):
    require_decoding_equals_the_forward(model_of(level, act, sample=dict(every=1)))
