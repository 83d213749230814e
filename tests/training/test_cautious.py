"""A run with optim.cautious_decay in the kernels: other bytes than without, and the same after a resume."""

import signal

import pytest

from tests.support.loop import stop_after, train
from tests.training.test_recovery import final, run_config


@pytest.mark.slow
@pytest.mark.parametrize("master", ["none", "fp32"])
def test_cautious_run_resumes_to_its_own_bytes(tmp_path, monkeypatch, master):
    muon = dict(name="muon", master=master, weight_decay=5.0)
    sections = dict(train=dict(steps=4, dtype="bf16"), log=dict(stats_every=2))
    plain, cautious = (run_config(optim=muon | dict(cautious_decay=c), **sections) for c in (False, True))
    assert train(cautious, tmp_path / "whole", resume=False) == 0 == train(plain, tmp_path / "plain", resume=False)
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert train(cautious, tmp_path / "parts", resume=False) == 128 + signal.SIGTERM
    assert train(cautious, tmp_path / "parts", resume=True) == 0
    whole, parts, without = (final(tmp_path / run) for run in ("whole", "parts", "plain"))
    assert parts[1] == whole[1] and whole[1]["params"] != without[1]["params"]
