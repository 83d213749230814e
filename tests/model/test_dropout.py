"""Dropout in a step: the gradients of autograd with the same masks, and masks that depend
on nothing but the sample.
"""

import pytest
import torch

from gpt2_triton.data.packing import pack_batch
from gpt2_triton.training.lr_schedule import step_inputs
from tests.model.test_lifetimes import recorded_step
from tests.support.helpers import max_error
from tests.support.models import (
    EXACT,
    batches,
    exact_model,
    gpt2_loss,
    leaves_of,
    require_gradients,
    train_steps,
)
from tests.support.philox import dropout_factors

P = 0.3
DROPOUT = EXACT["model"] | dict(dropout=P)
WITH_DROPOUT = dict(model=dict(dropout=P))


def factors(config, micro):
    """Return `dropout` for gpt2_loss in this micro-step of the first step of train_steps."""
    rows = config.train.batch_size * config.train.seq_len

    def dropout(i, x):
        drawn = dropout_factors([0, 1, 0, micro * rows], rows, x.shape[-1], i, config.model.dropout)
        return x * drawn.view(x.shape).to(x)

    return dropout


@pytest.mark.parametrize("level", ["none", "gelu+ln+qkv", "block"])
def test_loss_and_gradients_equal_autograds_with_the_same_masks(level):
    """In two micro-steps, whose masks differ."""
    model = exact_model(level, model=DROPOUT)
    config, params = model.config, leaves_of(model)
    train_steps(model, 1)
    losses = [
        gpt2_loss(model, params, *batch, dropout=factors(config, micro))
        for micro, batch in enumerate(batches(config, 2))
    ]
    (sum(losses) / 2).backward()
    assert abs(model.state.step_out[0].item() - sum(losses).item() / 2) < 1e-12 * sum(losses).item()
    require_gradients(model, params)


def test_masks_do_not_depend_on_micro_batches():
    """A step of four sequences at once, or of two and two."""
    found = []
    for size in (4, 2):
        model = exact_model(model=DROPOUT, train=EXACT["train"] | dict(batch_size=size))
        halves = batches(exact_model().config, 2)
        ids, targets = (torch.cat(t).view(-1, size, 8) for t in zip(*halves, strict=True))
        model.begin_step(step_inputs(0, model.config), 0, 1)
        for micro, (i, t) in enumerate(zip(ids, targets, strict=True)):
            model.micro_step(pack_batch(None, i.numpy(), t.numpy(), 300), first=micro == 0)
        found.append((model.end_step().result().loss, model.state.grads))
    assert abs(found[0][0] - found[1][0]) < 1e-12 and max_error(found[0][1], found[1][1]) < 1e-12


def test_without_dropout_nothing_is_launched_or_planned_for_it(monkeypatch):
    model, launches = recorded_step("none", monkeypatch)
    assert "dbranch" not in model.plan.buffers and "dropout" not in {
        name for _, name, *_ in launches
    }
    with_dropout, _ = recorded_step("none", monkeypatch, **WITH_DROPOUT)
    R, C = model.dims["R"], model.dims["C"]
    assert (
        with_dropout.plan.total - model.plan.total
        == with_dropout.plan.buffers["dbranch"].nbytes
        == 4 * R * C
    )


def test_evaluation_and_decoding_are_without_dropout():
    ids, targets = (t.numpy() for t in batches(exact_model().config, 1)[0])
    found = []
    for sizes in (EXACT["model"], DROPOUT):
        model = exact_model(model=sizes, sample=dict(every=1))
        model.prefill(ids[0, :3].tolist(), slice(0, 1))
        model.decoding.seq.copy_(torch.tensor([[ids[0, 3], 3, 0, 0, 0]]))
        model.decode(0.0, 0, 1.0)
        found.append((model.evaluate(ids, targets), model.decoding.logits.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
