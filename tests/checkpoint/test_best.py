"""checkpoint.best: the checkpoint of the lowest validation loss is kept, and RUN/best is its name."""

import json

import pytest

from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.config.load import load_config
from gpt2_triton.errors import CheckpointError, ConfigError
from gpt2_triton.training import trainer
from tests.training.test_trainer import run_config, stop_after, train

LOSSES = [0.5, 3.0, 1.0, 2.0, float("nan"), 1.0]  # after 0 ... 5 steps


def best_config(**checkpoints):
    """Return a cheap configuration: the losses are replaced, so one layer and 32 tokens will do."""
    return run_config(
        eval=dict(every=1, tokens=64), sample=dict(every=0), checkpoint=dict(keep=1) | checkpoints,
        model=dict(n_layer=1), train=dict(total_batch_tokens=32),
    )  # fmt: skip


@pytest.fixture
def losses(monkeypatch):
    """Replace the validation loss of each step by that in LOSSES."""
    monkeypatch.setattr(trainer, "validation_loss", lambda model, *_: LOSSES[model.done])
    original = trainer.Trainer._validate

    def with_step(self, step):
        self.model.done = step
        original(self, step)

    monkeypatch.setattr(trainer.Trainer, "_validate", with_step)


def steps(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("interrupted", [None, 1, 3], ids=["unbroken", "before the best", "after it"])
def test_best_checkpoint_is_kept(losses, tmp_path, monkeypatch, interrupted):
    """It is that of step 2, although keep is 1; neither the one before training nor a later tie."""
    if interrupted:
        with monkeypatch.context() as patch:
            stop_after(patch, interrupted)
            train(best_config(best="val_loss"), tmp_path, resume=False)
    assert train(best_config(best="val_loss"), tmp_path, resume=bool(interrupted)) == 0
    assert steps(tmp_path) == ["step_00000002", "step_00000005"]
    found = find_checkpoint(tmp_path / "best")
    state = json.loads((found / "state.json").read_text())
    assert found == tmp_path / "checkpoints" / "step_00000002" and state["best"] == [2, 1.0]


def test_best_of_a_run_without_one_names_the_option(losses, tmp_path):
    assert train(best_config(), tmp_path, resume=False) == 0
    assert steps(tmp_path) == ["step_00000005"]
    with pytest.raises(CheckpointError, match="keeps no best checkpoint; train with --checkpoint.best val_loss"):
        find_checkpoint(tmp_path / "best")


def test_checkpoint_best_without_validation_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("checkpoint: {best: val_loss}\neval: {every: 0}")
    with pytest.raises(ConfigError, match="x.yaml:1: checkpoint.best: there is no validation loss"):
        load_config(path)
