"""A run that resumes with larger steps: its data go on where they stopped, and it resumes to its own bytes."""

import signal

import pytest

from gpt2_triton.data.loader import TrainLoader
from tests.support.loop import records, stop_after, train
from tests.training.test_recovery import final, run_config

SMALL, LARGE = dict(steps=4, dtype="bf16", total_batch_tokens=16), dict(steps=5, dtype="bf16", total_batch_tokens=32)


def ramp_config(train, **optim):
    muon = dict(name="muon", lr=1e-2, weight_decay=1.0, warmup=2, wsd_decay_frac=0.5)
    return run_config(train=train, optim=muon | optim, checkpoint=dict(every=3))


@pytest.mark.slow
@pytest.mark.parametrize("master", ["none", "fp32"])
def test_larger_steps_go_on_with_the_next_samples(tmp_path, monkeypatch, master):
    """Three steps of one sequence, a fourth that is not kept, then two steps of two, of which the last decays."""
    read, batch = [], TrainLoader.batch

    def recorded(self, first, count):
        read.append((first, count))
        return batch(self, first, count)

    small = ramp_config(SMALL, master=master, schedule="constant")
    large = ramp_config(LARGE, master=master, schedule="trapezoid")
    for run in ("whole", "parts"):
        assert train(small, tmp_path / run, resume=False) == 0
        (tmp_path / run / "checkpoints/step_00000004").rename(tmp_path / f"{run}_4")
    monkeypatch.setattr(TrainLoader, "batch", recorded)
    assert train(large, tmp_path / "whole", resume=True) == 0
    assert read[:2] == [(3, 2), (5, 2)]
    state, tensors = final(tmp_path / "whole")
    assert (state["step"], state["sample"]) == (5, 7)
    rates = [record["lr"] for record in records(tmp_path / "whole") if "lr" in record]
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 8e-3, 4e-3])  # of trapezoid: D is 2.5 of 5 steps
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert train(large, tmp_path / "parts", resume=True) == 128 + signal.SIGTERM
    assert train(large, tmp_path / "parts", resume=True) == 0
    assert final(tmp_path / "parts")[1] == tensors
