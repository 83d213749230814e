"""The first command of the README: in 8 of 40 steps the loss falls from 5.5 to below
4.7; its checkpoint samples.

It runs in this process, whose interpreter is fast; test_streams.py and
test_install.py start processes.
"""

import json

import pytest

from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main
from gpt2_triton.commands.train import app


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_loss_falls_and_its_checkpoint_can_be_sampled(tmp_path, capsys):
    directory = str(tmp_path / "run")
    assert main(app, ["configs/quickstart.yaml", "--run_dir", directory, "--train.steps", "8"]) == 0
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [record["loss"] for record in records if "loss" in record]
    assert 5.3 < losses[0] < 5.7  # 256 equally likely bytes cost log(256) = 5.55
    assert sum(losses[-4:]) / 4 < 4.7  # 4.5; the loss of a step, of 1,024 tokens, varies by 0.1
    capsys.readouterr()
    assert main(tools, ["sample", directory, "--prompt", "The ", "--tokens", "4"]) == 0
    assert "The " in capsys.readouterr().out
    assert main(tools, ["plot", directory, "-o", str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").stat().st_size > 10_000
