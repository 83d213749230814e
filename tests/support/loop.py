"""The training loop for tests of loop, checkpoints and logs: over the reference launchers in plain torch.

They take a step of the tiny model in milliseconds, Triton's interpreter in half a second.  Runs in bf16 and fp8, which
the reference does not round, and all runs on a GPU go through the kernels.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpt2_triton import kernels
from gpt2_triton.config.config import Config
from gpt2_triton.training import trainer
from tests.support import reference


def _kernels(config: Config) -> Any:
    return kernels if torch.cuda.is_available() or config.train.dtype == "bf16" else reference


_train = trainer.train  # tests may put the train of this module in its place


def train(config: Config, *args: Any, **keywords: Any) -> int:
    return _train(config, *args, K=_kernels(config), **keywords)


def before_steps(act: Callable[[trainer.Trainer, int], Any], patch: pytest.MonkeyPatch | None = None) -> None:
    """Call act(trainer, index) before each step is launched; without `patch` as long as the process lives."""
    launch = trainer.Trainer._train_step
    acting = lambda self, index: (act(self, index), launch(self, index))  # noqa: E731
    (patch or pytest.MonkeyPatch()).setattr(trainer.Trainer, "_train_step", acting)


def make_trainer(config: Config, *args: Any, **keywords: Any) -> trainer.Trainer:
    return trainer.Trainer(config, *args, K=_kernels(config), **keywords)
