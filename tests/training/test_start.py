"""The start of a run: a step of few tokens at a high learning rate is warned of, with the step to take instead, and fp8
is refused on a GPU that has none.
"""

from pathlib import Path

import pytest
import torch

from gpt2_triton import device
from gpt2_triton.commands.train import train
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.errors import ConfigError
from gpt2_triton.training.start import starting, warn_of_slow_steps


def warned(capsys, tmp_path, **sections):
    """Return the warnings of a start, without that of a missing GPU."""
    with starting(Config.model_validate(sections), tmp_path / "run", resume=False):
        lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if "no GPU found" not in line)


@pytest.mark.parametrize("steps, time", [(524_288, "about 45 hours"), (4096, "about 21 minutes"), (1024, None)])
@pytest.mark.parametrize("present", [False, True])
def test_long_steps_without_a_gpu_are_warned_of(capsys, monkeypatch, steps, time, present):
    monkeypatch.setattr(device, "present", lambda: present)
    warn_of_slow_steps(Config.model_validate(dict(train=dict(batch_size=1, total_batch_tokens=steps))))
    printed = capsys.readouterr().err
    if present or time is None:
        assert not printed
    else:
        assert printed.startswith(f"warning: no GPU found: in Triton's interpreter a step takes {time}; look for")


def test_few_tokens_at_a_high_learning_rate_are_warned_of(capsys, tmp_path):
    printed = warned(capsys, tmp_path, train=dict(batch_size=12))
    what = "12,288 tokens a step are few for optim.lr 0.0006: the loss may stay high"
    todo = "in a new run set train.total_batch_tokens to 516096, or lower optim.lr"
    assert printed == f"warning: {what}; {todo}\n"
    fixed = Config.model_validate(dict(train=dict(batch_size=12, total_batch_tokens=516_096)))
    assert StepShape.of(fixed).accumulation == 42
    small = dict(train=dict(batch_size=12), model=dict(n_layer=6, n_head=6, n_embd=384))
    for quiet in (dict(train=dict(batch_size=98)), dict(train=dict(batch_size=12), optim=dict(lr=5.9e-4)), small):
        assert warned(capsys, tmp_path, **quiet) == ""


def test_a_rate_that_is_high_for_adamw_needs_more_tokens(capsys, tmp_path):
    train, optim = dict(batch_size=64, total_batch_tokens=131_072), dict(lr=1.5e-3)
    printed = warned(capsys, tmp_path, train=train, optim=optim)
    assert printed.startswith("warning: 131,072 tokens a step are few for optim.lr 0.0015: ")
    more = train | dict(total_batch_tokens=196_608)
    for quiet in ((train, dict(lr=1.4e-3)), (train, optim | dict(name="muon")), (more, optim)):
        assert warned(capsys, tmp_path, train=quiet[0], optim=quiet[1]) == ""


def test_fp8_is_refused_before_the_run_has_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "present", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(device, "architecture", lambda: "8.0")
    refused = "train.precision: fp8 needs .*, NVIDIA A100 is 8.0; set it to bf16"
    with (
        pytest.raises(ConfigError, match=refused),
        starting(
            Config.model_validate(dict(train=dict(precision="fp8", dtype="bf16"))), tmp_path / "run", resume=False
        ),
    ):
        pass
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=refused):
        train(Path("gpt2_124m"), "--train.precision", "fp8", plan=True)
