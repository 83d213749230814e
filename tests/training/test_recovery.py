"""Outliers are skipped in their own step; a rewound run equals one without the bad
data; both resume exactly.
"""

import math
import signal

import numpy as np
import pytest
import torch

import gpt2_triton.model.memory_plan
from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.data.mixture import Mixture
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.errors import DataError
from gpt2_triton.model.model import Model
from gpt2_triton.training import tasks, trainer
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.trainer import Trainer
from tests.support.checkpoints import load_checkpoint
from tests.support.loop import before_steps, make_trainer, poison, records, train, train_until
from tests.support.tiny import merged, tiny_config

SPIKE = 4  # the step, counted from 0, whose loss and gradient are ten times what they were


def run_config(**sections):
    """One layer, two sequences per step, no evaluation."""
    return tiny_config(**merged(dict(model=dict(n_layer=1), checkpoint=dict(keep=0)), sections))


def final(run):
    state, tensors = load_checkpoint(find_checkpoint(run))
    return state, {name: bytes(t.view(torch.uint8).numpy()) for name, t in tensors.items()}


# ---- outliers ----


def outlier_config():
    return run_config(train=dict(steps=6, skip_loss_z=1.7), optim=dict(lr=1e-4))


@pytest.fixture(scope="module")
def spike():
    """A window of 4 steps, in which z is at most 3 ** 0.5, and one step with ten times the
    loss scale, and gradient.
    """

    def row(step, config):
        inputs = step_inputs(step, config)
        inputs[trainer.step_io.LOSS_SCALE] *= 10 if step == SPIKE else 1
        return inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2_triton.model.memory_plan, "WINDOW", 4)
        patch.setattr(trainer, "step_inputs", row)
        yield


@pytest.fixture(scope="module")
def spiked(spike, tmp_path_factory):
    """(run directory, a list with True for each step that changed the weights)"""
    run, changed, original = tmp_path_factory.mktemp("whole"), [], Model.end_step

    def recorded(self):
        before = self.state.params.clone()
        out = original(self)
        changed.append(not torch.equal(before, self.state.params))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "end_step", recorded)
        assert train(outlier_config(), run) == 0
    return run, changed


def test_outlier_is_skipped_in_its_own_step_and_counted_separately(spiked):
    run, changed = spiked
    assert changed == [step != SPIKE for step in range(6)]
    logged = records(run)
    assert [r["step"] for r in logged if "skipped" in r] == [SPIKE + 1]
    assert logged[SPIKE]["outlier"] is True and logged[SPIKE]["loss_z"] > 1.7
    assert ["loss_z" in r for r in logged] == [step >= 4 for step in range(6)]
    state = final(run)[0]
    counted = {
        key: state[key]
        for key in ("skipped", "outliers", "skipped_in_a_row", "without_update", "rewinds")
    }
    assert counted == {
        "skipped": 1,
        "outliers": 1,
        "skipped_in_a_row": 0,
        "without_update": 0,
        "rewinds": 0,
    }


def test_resume_continues_with_a_half_full_window(spiked, tmp_path):
    assert train_until(2, outlier_config(), tmp_path) == 128 + signal.SIGTERM
    assert final(tmp_path)[0]["step"] == 2
    assert train(outlier_config(), tmp_path, resume=True) == 0
    assert final(tmp_path) == final(spiked[0]) and records(tmp_path) == records(spiked[0])


# ---- rewinds ----


def rewind_config():
    return run_config(train=dict(steps=4, rewind_after=1), checkpoint=dict(every=2, keep=1))


@pytest.fixture(scope="module")
def bad_data():
    """Samples 4 and 5, of step 3, are replaced by tokens 255, which make the
    gradient NaN at any step.
    """
    batch, micro_step = Mixture.batch, Model.micro_step

    def marked(self, first, count):
        tokens = batch(self, first, count)
        return np.full_like(tokens, 255) if first == 4 else tokens

    def poisoned(self, packed, **which):
        micro_step(self, packed, **which)
        if (packed[: self.B * self.T] == 255).all():
            self.K.fill(self.state.grads[:1], math.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mixture, "batch", marked)
        patch.setattr(Model, "micro_step", poisoned)
        yield


@pytest.fixture(scope="module")
def rewound(bad_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole")
    assert train(rewind_config(), run) == 0
    return run


def test_rewind_continues_from_the_checkpoint_with_later_data(rewound, tmp_path):
    """Step 3 fails.  The run returns to step 2 and takes samples 6 and 7,
    like a model driven by hand.
    """
    logged = records(rewound)
    assert [r["step"] for r in logged] == [1, 2, 2, 3, 4]
    assert logged[2] == {"step": 2, "rewound_from": 3, "sample": 6} and not any(
        "skipped" in r for r in logged
    )
    other, losses = make_trainer(rewind_config(), tmp_path), []
    tasks.calibrate(other)
    for step, first in enumerate((0, 2, 6, 8)):
        tokens = other.data.train.batch(first, 2)
        other.model.begin_step(step_inputs(step, other.config), step, other.config.train.seed)
        other.model.micro_step(pack_batch(None, tokens[:, :-1], tokens[:, 1:], 256), first=True)
        losses.append(other.model.end_step().result().loss)
    other.close()
    assert [r["loss"] for r in logged if "loss" in r] == losses
    state, tensors = final(rewound)
    assert tensors["params"] == bytes(other.model.state.params.cpu().view(torch.uint8).numpy())
    assert (state["step"], state["sample"], state["skipped"]) == (4, 10, 1)
    assert (state["rewinds"], state["rewound_to"]) == (1, 2)


@pytest.mark.parametrize("launches", [3, 4, 5], ids=["at the failure", "at the rewind", "after it"])
def test_resume_around_a_rewind_gives_the_same_run(rewound, tmp_path, launches):
    assert train_until(launches, rewind_config(), tmp_path) == 128 + signal.SIGTERM
    assert train(rewind_config(), tmp_path, resume=True) == 0
    assert final(tmp_path) == final(rewound) and records(tmp_path) == records(rewound)


def test_missing_data_after_a_failed_step_leaves_the_rewind_to_the_resume(
    rewound, tmp_path, monkeypatch
):
    """The data of step 4 is missing when step 3 fails: a save of step 3 would lose its rewind."""

    def lose_data(_, index):
        if index == 3:
            raise DataError("cut off")

    with monkeypatch.context() as patch, pytest.raises(DataError):
        before_steps(lose_data, patch)
        train(rewind_config(), tmp_path)
    assert train(rewind_config(), tmp_path, resume=True) == 0
    assert final(tmp_path) == final(rewound) and records(tmp_path) == records(rewound)


def test_rewind_that_is_due_before_the_first_checkpoint_is_told(tmp_path, monkeypatch, capsys):
    before_steps(lambda self, index: index == 1 and poison(self), monkeypatch)
    assert (
        train(
            run_config(train=dict(steps=4, rewind_after=1), checkpoint=dict(every=4)),
            tmp_path,
        )
        == 0
    )
    assert "step 2: no checkpoint to rewind to; steps are only skipped" in capsys.readouterr().out


def test_rewind_passes_over_damaged_checkpoints(bad_data, tmp_path, monkeypatch, capsys):
    """Step 3 fails, and step 2 is damaged."""
    rewind = Trainer._rewind

    def after_damage(self):
        self.checkpointer.wait()
        (tmp_path / "checkpoints" / "step_00000002" / "rank_00000.safetensors").write_bytes(b"")
        return rewind(self)

    monkeypatch.setattr(Trainer, "_rewind", after_damage)
    config = run_config(train=dict(steps=4, rewind_after=1), checkpoint=dict(every=1, keep=0))
    assert train(config, tmp_path) == 0
    assert [(r["step"], r["sample"]) for r in records(tmp_path) if "rewound_from" in r] == [(1, 6)]
    assert capsys.readouterr().err.count("warning: skipping damaged") == 1


def test_checkpoints_to_which_the_run_may_rewind_are_kept(tmp_path):
    for step in (2, 4, 6, 8, 9):
        save_checkpoint(tmp_path, step, {"params": torch.zeros(1)}, {}, Retention(1, rewind=4))
    assert sorted(int(p.name[-2:]) for p in tmp_path.iterdir()) == [4, 8, 9]
