"""checkpoint.best: the checkpoint of the lowest validation loss is kept,
and RUN/best is its name.
"""

import errno
import json
import os

import pytest

from gpt2_triton.checkpoint import async_save
from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.errors import CheckpointError
from gpt2_triton.training import tasks
from tests.support.loop import before_steps, poison, train, train_until
from tests.training.test_trainer import run_config

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
    monkeypatch.setattr(tasks, "validation_loss", lambda model, *_: LOSSES[model.done])
    original = tasks.validate

    def with_step(run, step):
        run.model.done = step
        original(run, step)

    monkeypatch.setattr(tasks, "validate", with_step)


def steps(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "interrupted", [None, 1, 3], ids=["unbroken", "before the best", "after it"]
)
def test_best_checkpoint_is_kept(losses, tmp_path, interrupted):
    """It is that of step 2, although keep is 1; neither the one before training nor a later tie."""
    if interrupted:
        train_until(interrupted, best_config(best="val_loss"), tmp_path)
    assert train(best_config(best="val_loss"), tmp_path, resume=bool(interrupted)) == 0
    assert steps(tmp_path) == ["step_00000002", "step_00000005"]
    found = find_checkpoint(tmp_path / "best")
    state = json.loads((found / "state.json").read_text())
    assert found == tmp_path / "checkpoints" / "step_00000002" and state["best"] == [2, 1.0]


@pytest.mark.parametrize(
    "interrupted", [None, 1, 3], ids=["unbroken", "before the best", "after it"]
)
def test_patience_ends_a_run_that_no_longer_improves(losses, tmp_path, interrupted, capsys):
    """Steps 3 and 4 are not below step 2.  A resume ends at once, and with
    more patience it continues.
    """
    config = best_config(best="val_loss").replace(train=dict(patience=2))
    if interrupted:
        train_until(interrupted, config, tmp_path)
    for resume in (bool(interrupted), True):
        assert train(config, tmp_path, resume=resume) == 0
        assert steps(tmp_path) == ["step_00000002", "step_00000004"]
        ended = f"ended after step 4: 2 validations without a lower loss than in {tmp_path}/best"
        assert ended in capsys.readouterr().out
    assert train(config.replace(train=dict(patience=3)), tmp_path, resume=True) == 0
    assert steps(tmp_path) == ["step_00000002", "step_00000005"]
    assert "ended after" not in capsys.readouterr().out


def test_best_that_cannot_be_written_leaves_the_one_before(losses, tmp_path, monkeypatch, capsys):
    """The disk is full once, when step 2 is saved."""
    original = async_save.save_checkpoint

    def full_at_step_2(directory, step, *rest):
        if step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(directory, step, *rest)

    monkeypatch.setattr(async_save, "save_checkpoint", full_at_step_2)
    monkeypatch.setattr("tests.checkpoint.test_best.LOSSES", [9.0, 3.0, 1.0, 4.0, 4.0, 4.0])
    assert train(best_config(best="val_loss", every=1), tmp_path) == 0
    assert "No space left" in capsys.readouterr().err
    state = json.loads((find_checkpoint(tmp_path / "best") / "state.json").read_text())
    assert state["best"] == [1, 3.0]


@pytest.mark.parametrize(
    ("later", "best"),
    [([9.0, 4.0, 3.0, 2.0, 9.0, 9.0], [2, 3.0]), ([9.0, 3.0, 4.0, 2.0, 9.0, 9.0], [3, 9.0])],
    ids=["of step 2", "of step 1, which is deleted"],
)
def test_rewind_restores_the_best_of_its_step(losses, tmp_path, monkeypatch, later, best):
    """Step 3 is the best, and is undone; of the best up to step 2 only a checkpoint that
    is still there counts.
    """
    later = [*later]
    monkeypatch.setattr("tests.checkpoint.test_best.LOSSES", later)
    done = []
    before_steps(
        lambda self, index: index == 3 and not done and done.append(poison(self)), monkeypatch
    )
    config = best_config(best="val_loss", every=2, keep=1).replace(train=dict(rewind_after=1))
    later_losses = iter([9.0, 9.0, 9.0])

    def validate(run, step, original=tasks.validate):
        if done and step > 2:
            later[step] = next(later_losses)
        original(run, step)

    monkeypatch.setattr(tasks, "validate", validate)
    assert train(config, tmp_path) == 0
    state = json.loads((find_checkpoint(tmp_path / "best") / "state.json").read_text())
    assert state["best"] == best


def test_best_of_a_run_without_one_names_the_option(losses, tmp_path):
    assert train(best_config(), tmp_path) == 0
    assert steps(tmp_path) == ["step_00000005"]
    with pytest.raises(
        CheckpointError,
        match="best checkpoint; take .*, its newest, or train with checkpoint.best val_loss",
    ):
        find_checkpoint(tmp_path / "best")
