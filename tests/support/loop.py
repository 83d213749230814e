"""The training loop for tests of loop, checkpoints and logs: over the
reference launchers in plain torch.

They take a step of the tiny model in milliseconds, Triton's interpreter in half a second.  Runs in
bf16 and fp8, which the reference does not round, and all runs on a GPU go through the kernels.
"""

import itertools
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2_triton import kernels
from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.config.config import Config
from gpt2_triton.device import device_name
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.distributed.watchdog import Watchdog
from gpt2_triton.training import trainer
from gpt2_triton.training.metrics import METRICS, read_metrics
from gpt2_triton.training.preemption import ShutdownSignals
from gpt2_triton.training.start import Resume
from tests.support import reference


def _kernels(config: Config) -> Any:
    return kernels if torch.cuda.is_available() or config.train.dtype == "bf16" else reference


_train = trainer.train  # tests may put the train of this module in its place


def train(
    config: Config,
    run_dir: Path | None,
    resume: Resume = False,
    signals: ShutdownSignals | None = None,
) -> int:
    signals = signals or ShutdownSignals(rank_and_size()[1])
    return _train(config, run_dir, resume, signals, K=_kernels(config))


def before_steps(
    act: Callable[[trainer.Trainer, int], Any], patch: pytest.MonkeyPatch | None = None
) -> None:
    """Call act(trainer, index) before each step is launched; without `patch` as
    long as the process lives.
    """
    launch = trainer.Trainer._train_step
    acting = lambda self, index: (act(self, index), launch(self, index))  # noqa: E731
    (patch or pytest.MonkeyPatch()).setattr(trainer.Trainer, "_train_step", acting)


def make_trainer(config: Config, run_dir: Path, found: Path | None = None) -> trainer.Trainer:
    """Return the trainer of a run on one rank."""
    timeout = config.parallel.timeout
    watchdog = Watchdog(ProcessGroup(device_name(), timeout), timeout)
    return trainer.Trainer(config, run_dir, found, watchdog, ShutdownSignals(1), K=_kernels(config))


def train_until(launch: int, config: Config, run_dir: Path) -> int:
    """Train with SIGTERM before the launch of this number, from 1; steps that a
    rewind undoes count as well.
    """
    count = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        before_steps(
            lambda *_: next(count) == launch and signal.raise_signal(signal.SIGTERM), patch
        )
        return train(config, run_dir)


def poison(made: trainer.Trainer) -> None:
    """Make the next loss NaN."""
    made.model.K.fill(made.model.train_view.w.lnb[0], math.nan)


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl without times, in which equal runs differ."""
    return [
        {k: v for k, v in r.items() if k not in ("ms", "tok_s", "mfu")}
        for r in read_metrics(run / METRICS)
    ]


def outcome(run: Path) -> tuple[Any, ...]:
    """Return what equal runs have in common: the newest checkpoint's tensors, and the records."""
    return final_bytes(run), records(run)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run) if "loss" in record]


def final_bytes(run: Path) -> tuple[str, bytes]:
    """Return the name of the run's newest checkpoint and the bytes of its tensors on rank 0."""
    step_dir = find_checkpoint(run)
    return step_dir.name, (step_dir / "rank_00000.safetensors").read_bytes()
