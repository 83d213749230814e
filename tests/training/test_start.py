"""The start of a run: fp8 is refused on a GPU that has none, as is a project that W&B
would; a new Triton is named.
"""

from pathlib import Path

import pytest
import torch

from gpt2_triton import device, version
from gpt2_triton.commands.train import train
from gpt2_triton.config.config import Config
from gpt2_triton.errors import ConfigError
from gpt2_triton.training.setup import choose_precision
from gpt2_triton.training.start import starting


@pytest.fixture
def a100(monkeypatch):
    """A GPU without fp8."""
    monkeypatch.setattr(device, "present", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(device, "architecture", lambda: "8.0")
    monkeypatch.setattr(device, "memory_bytes", lambda name: 40 << 30)


@pytest.mark.usefixtures("a100")
def test_fp8_is_refused_before_the_run_has_a_directory(tmp_path):
    refused = "train.precision: fp8 needs .*, {} is 8.0; set it to bf16"
    config = Config.model_validate(dict(train=dict(precision="fp8", dtype="bf16")))
    with (
        pytest.raises(ConfigError, match=refused.format("NVIDIA A100")),
        starting(config, tmp_path / "run", False),
    ):
        pass
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=refused.format("this GPU")):
        train(Path("gpt2_124m"), "--train.precision", "fp8", plan=True)


@pytest.mark.usefixtures("a100")
def test_auto_keeps_no_fp8_on_a_gpu_without_it(tmp_path):
    (tmp_path / "state.json").write_text('{"config": {"train": {"precision": "fp8"}}}')
    config = Config.model_validate(dict(train=dict(precision="auto", dtype="bf16")))
    with pytest.raises(ConfigError, match="NVIDIA A100 is 8.0; set it to bf16"):
        choose_precision(config, tmp_path)


def test_run_directory_may_be_a_link_to_a_directory_that_is_not_there_yet(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "scratch" / "run")
    config = Config.load("quickstart")
    with starting(config, tmp_path / "link", False) as made:
        assert made == tmp_path / "link" and made.is_dir()


@pytest.mark.parametrize(("found", "lines"), [("3.9.1", 0), ("3.10.0", 1), ("4.0+git1a2b", 1)])
def test_a_triton_newer_than_the_tests_is_named_once_at_the_start(
    tmp_path, monkeypatch, capsys, found, lines
):
    monkeypatch.setattr(version, "installed_version", lambda name: found)
    config = Config.load("quickstart")
    with starting(config, tmp_path / "run", False):
        pass
    printed = capsys.readouterr().out.splitlines()
    assert [
        line.partition(": newer than 3.9, the newest that is tested; ")[0] for line in printed
    ] == ([f"triton {found}"] * lines)
