"""A run with optim.decay_power and optim.adamw_decay_frac in the kernels: the same bytes after a resume."""

import signal

import pytest

from tests.support.loop import stop_after, train
from tests.training.test_recovery import final, run_config


@pytest.mark.slow
@pytest.mark.parametrize("master", ["none", "fp32"])
def test_run_with_two_power_laws_resumes_to_its_own_bytes(tmp_path, monkeypatch, master):
    optim = dict(name="muon", master=master, schedule="trapezoid", wsd_decay_frac=1.0)
    sections = dict(train=dict(steps=4, dtype="bf16"), log=dict(stats_every=2))
    plain, power = (run_config(optim=optim | o, **sections) for o in ({}, dict(decay_power=1.5, adamw_decay_frac=0.5)))
    assert train(power, tmp_path / "whole", resume=False) == 0 == train(plain, tmp_path / "plain", resume=False)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert train(power, tmp_path / "parts", resume=False) == 128 + signal.SIGTERM
    assert train(power, tmp_path / "parts", resume=True) == 0
    whole, parts, without = (final(tmp_path / run) for run in ("whole", "parts", "plain"))
    assert parts[1] == whole[1] and whole[1]["params"] != without[1]["params"]
