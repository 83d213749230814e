"""The first command of the README: in 16 of 40 steps the loss falls from 5.5 to below 4; its checkpoint samples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_loss_falls_and_its_checkpoint_can_be_sampled(tmp_path):
    directory = str(tmp_path / "run")
    run("train.py", "configs/quickstart.yaml", "--run_dir", directory, "--train.steps", "16")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert 5.3 < losses[0] < 5.7  # 256 equally likely bytes cost log(256) = 5.55
    assert sum(losses[-4:]) / 4 < 4.0  # 3.8; the loss of a step, of 1,024 tokens, varies by 0.1
    text = run("-m", "gpt2_triton", "sample", directory, "--prompt", "The ", "--tokens", "4")
    assert "The " in text
    run("-m", "gpt2_triton", "plot", directory, "-o", str(tmp_path / "loss.png"))
    assert (tmp_path / "loss.png").stat().st_size > 10_000
