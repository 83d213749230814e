"""The first command of the README, with half its steps: its loss falls without a spike, and its
checkpoint writes words.

It runs in this process, whose interpreter is fast; test_streams.py and
test_install.py start processes.
"""

import numpy as np
import pytest

from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main
from gpt2_triton.commands.train import app
from gpt2_triton.data.prepare.builtin import builtin_text
from gpt2_triton.training.metrics import METRICS, read_metrics


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_loss_falls_and_its_checkpoint_writes_words(tmp_path, capsys):
    directory = str(tmp_path / "run")
    half = ["--train.steps", "150", "--sample.every", "150"]
    assert main(app, ["configs/quickstart.yaml", "--run_dir", directory, *half]) == 0
    records = read_metrics(tmp_path / "run" / METRICS)
    losses = np.array([record["loss"] for record in records if "loss" in record])
    assert 5.3 < losses[0] < 5.7  # 256 equally likely bytes cost log(256) = 5.55
    assert losses[-20:].mean() < 2.0  # 1.83
    # the loss of a step, of 1,024 tokens, varies by 0.1
    assert all(losses[n] < losses[n - 10 : n].mean() + 0.5 for n in range(10, len(losses)))
    assert " training sequences of 128 tokens, names of Unicode's" in capsys.readouterr().out
    how = ["--prompt", "latin ", "--tokens", "300", "--temperature", "0.3"]
    assert main(tools, ["sample", directory, *how]) == 0
    words = capsys.readouterr().out.partition("latin ")[2].split()[:-1]  # the last may be cut off
    known = set(builtin_text().split())
    assert len(words) > 20 and sum(word in known for word in words) > 0.6 * len(words)
    assert main(tools, ["plot", directory, "-o", str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").stat().st_size > 10_000
