"""tests/chaos/soak.py: its samples, and what counts as growth."""

import os
import subprocess
import sys

import numpy as np

from tests.chaos import soak


def test_a_slope_beyond_its_error_counts_as_growth(capsys):
    noise = np.random.default_rng(0).standard_normal(90)
    samples = [
        {"seconds": float(i), "RSS, MiB": 100 + 0.1 * i + noise[i], "descriptors": 40.0, "threads": 20 + noise[i]}
        for i in range(90)
    ]
    assert soak.print_slopes(samples) == 1
    _, memory, descriptors, threads = capsys.readouterr().out.splitlines()
    assert memory.startswith("RSS, MiB") and memory.endswith("  GROWS") and 300 < float(memory.split()[4]) < 420
    assert descriptors.split() == ["descriptors", "40.0", "40.0", "0.00", "0.00"] and "GROWS" not in threads


def test_samples_begin_with_the_first_step_and_end_with_the_minutes_or_the_process(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    program = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('{\"loss\": 1}'); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program, str(metrics)]) as process:
        samples = soak.take_samples(process, metrics, minutes=0.01)
        process.kill()
    assert len(samples) == 1 and samples[0].keys() >= {"seconds", "RSS, MiB", "descriptors", "threads"}
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        assert soak.take_samples(process, tmp_path / "none", minutes=1) == []


def test_a_process_that_ends_before_its_sample_has_one_less(tmp_path, monkeypatch):
    """It is a zombie, which has no memory."""
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}')
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(process, "poll", lambda: None)
        assert soak.take_samples(process, tmp_path / "metrics.jsonl", minutes=1) == []
