"""The last lines of a run name its checkpoint and commands that a shell can run."""

import shlex
import sys
from pathlib import Path

import pytest

from gpt2_triton.training.next_steps import after_interruption, after_training
from tests.support.tiny import tiny_config

RUN = Path("runs/my first run")


@pytest.mark.parametrize(
    ("program", "words"), [("/bin/gpt2-triton", ["gpt2-triton"]), ("train.py", ["python", "-m", "gpt2_triton"])]
)
def test_finished_run_names_its_checkpoint_and_commands(monkeypatch, program, words):
    monkeypatch.setattr(sys, "argv", [program])
    checkpoint, sample, plot, resume = after_training(tiny_config(), RUN, 20, None)
    assert checkpoint == "checkpoint runs/my first run/checkpoints/step_00000020"
    assert shlex.split(sample) == ["sample", *words, "sample", str(RUN)]
    assert shlex.split(plot) == ["plot", *words, "plot", str(RUN)]
    assert shlex.split(resume)[-3:] == ["--run_dir", str(RUN), "--resume"]


def test_finished_run_with_a_best_checkpoint_samples_it():
    checkpoint, sample, *_ = after_training(
        tiny_config(eval=dict(every=5), checkpoint=dict(best="val_loss")), RUN, 20, (15, 2.5)
    )
    assert checkpoint.endswith("step_00000020; runs/my first run/best is step 15, validation loss 2.5000")
    assert shlex.split(sample)[-1] == f"{RUN}/best"


def test_stopped_run_tells_how_it_continues():
    checkpoint, sample, resume = after_interruption(RUN, 7, [4, 7, 9])
    assert checkpoint.endswith("checkpoints/step_00000007") and shlex.split(sample)[-1] == str(RUN)
    assert resume == "stopped after step 7; the same command with --run_dir 'runs/my first run' --resume continues"
    assert after_interruption(RUN, 0, []) == ["stopped before the first step: nothing is saved"]


@pytest.mark.parametrize("saved, repeated", [(6, "step 7 is repeated"), (4, "steps 5 to 7 are repeated")])
def test_run_stopped_before_a_rewind_names_the_checkpoint_that_exists(saved, repeated):
    checkpoint, _, resume = after_interruption(RUN, 7, [2, saved, 8])
    assert checkpoint.endswith(f"checkpoints/step_0000000{saved}") and f"stopped after step 7; {repeated}; " in resume


def test_best_step_of_an_earlier_part_is_not_recommended():
    """The run was resumed without checkpoint.best, so that later steps were not compared."""
    assert after_training(tiny_config(), RUN, 20, (15, 2.5)) == after_training(tiny_config(), RUN, 20, None)
