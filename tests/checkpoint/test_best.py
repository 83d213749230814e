"""checkpoint.best: the checkpoint of the lowest validation loss is kept, and RUN/best names it."""

import json

import pytest

from gpt2_triton.checkpoint import best
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
    """Replace the validation loss by that of LOSSES for the step."""
    monkeypatch.setattr(trainer, "validation_loss", lambda model, *_: LOSSES[model.done])
    original = trainer.Trainer._validate_if_due

    def with_step(self, step):
        self.model.done = step
        return original(self, step)

    monkeypatch.setattr(trainer.Trainer, "_validate_if_due", with_step)


def steps(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("interrupted", [None, 1, 3], ids=["unbroken", "before the best", "after it"])
def test_best_checkpoint_is_kept(losses, tmp_path, monkeypatch, interrupted):
    """With keep=1 step 2 stays: the loss before training does not count, and a later tie does not replace it."""
    if interrupted:
        with monkeypatch.context() as patch:
            stop_after(patch, interrupted)
            train(best_config(best="val_loss"), tmp_path, resume=False)
    assert train(best_config(best="val_loss"), tmp_path, resume=bool(interrupted)) == 0
    assert steps(tmp_path) == ["step_00000002", "step_00000005"]
    found = find_checkpoint(tmp_path / "best")
    state = json.loads((found / "state.json").read_text())
    assert found == tmp_path / "checkpoints" / "step_00000002" and state["best"] == [2, 1.0]


def test_find_best_names_the_key_that_keeps_it(losses, tmp_path):
    assert train(best_config(), tmp_path, resume=False) == 0
    assert steps(tmp_path) == ["step_00000005"]
    with pytest.raises(CheckpointError, match="keeps no best checkpoint; train with --checkpoint.best val_loss"):
        find_checkpoint(tmp_path / "best")


def test_a_run_that_goes_back_forgets_what_it_deletes():
    for target, left in ((3, None), (4, [4, 1.0]), (5, [4, 1.0])):
        state = {"best": [4, 1.0]}
        best.go_back(state, target)
        assert state["best"] == left
    best.go_back(state := {"best": None}, 0)
    assert best.step_of(state) is None and best.enter(state, 5, 2.0) and not best.enter(state, 6, 2.0)


def test_what_is_not_finite_is_never_the_best():
    state = {"best": None}
    assert not best.enter(state, 1, float("nan")) and not best.enter(state, 2, float("inf"))
    assert best.enter(state, 3, 5.0) and not best.enter(state, 4, float("nan")) and state["best"] == [3, 5.0]


def test_best_without_validation_is_a_config_error(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("checkpoint: {best: val_loss}\neval: {every: 0}")
    with pytest.raises(ConfigError, match="x.yaml:1: checkpoint.best: there is no validation loss to go by"):
        load_config(path)
