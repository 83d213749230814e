"""The start of a run: fp8 is refused on a GPU that has none."""

from pathlib import Path

import pytest
import torch

from gpt2_triton import device
from gpt2_triton.commands.train import train
from gpt2_triton.config.config import Config
from gpt2_triton.errors import ConfigError
from gpt2_triton.training.start import starting


def test_fp8_is_refused_before_the_run_has_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "present", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(device, "architecture", lambda: "8.0")
    refused = "train.precision: fp8 needs .*, {} is 8.0; set it to bf16"
    with (
        pytest.raises(ConfigError, match=refused.format("NVIDIA A100")),
        starting(
            Config.model_validate(dict(train=dict(precision="fp8", dtype="bf16"))), tmp_path / "run", resume=False
        ),
    ):
        pass
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=refused.format("this GPU")):
        train(Path("gpt2_124m"), "--train.precision", "fp8", plan=True)
