"""The start of a run: check the configuration, make the run's directory."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from gpt2_triton.checkpoint.format import list_steps
from gpt2_triton.config.config import Config
from gpt2_triton.console import print_line
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.errors import CheckpointError, ConfigError
from gpt2_triton.training.metrics import METRICS, RUN
from gpt2_triton.training.preemption import unmarked_by_errors
from gpt2_triton.version import triton_notice

Resume = bool | Literal["must"]


@contextlib.contextmanager
def starting(
    config: Config, run_dir: Path | None, resume: Resume, name: str = ""
) -> Iterator[Path | None]:
    """Check the configuration, on rank 0 also the tokenizer, and yield the run's
    directory; others yield `run_dir`.
    """
    from gpt2_triton import device
    from gpt2_triton.data.mixture import sources
    from gpt2_triton.data.shards import require_tokenizer
    from gpt2_triton.data.tokenizer import located
    from gpt2_triton.training import cpu_time

    if config.train.precision == "fp8":
        require_own_fp8()
    if rank_and_size()[0]:
        yield run_dir
        return
    check_run_dir(run_dir, resume)
    if not device.present():
        cpu_time.require_time(config, run_dir)
    notice = triton_notice()
    if notice:
        print_line(notice)
    tokenizer = located(config.data.tokenizer, run_dir) if run_dir else config.data.tokenizer
    require_rows(config, tokenizer)
    for source in (*sources(config.data.train), *sources(config.data.val)):
        require_tokenizer(source.pattern, tokenizer)
    with creating_run_dir(name, run_dir) as path:
        yield path


def require_fp8(name: str, architecture: str) -> None:
    """Raise ConfigError if this GPU has no fp8 products."""
    from gpt2_triton import device

    if not device.has_fp8(architecture):
        raise ConfigError(
            "train.precision: fp8 needs a GPU that multiplies e4m3 (NVIDIA from 8.9, AMD gfx950), "
            f"{name} is {architecture}; set it to bf16"
        )


def require_own_fp8() -> None:
    """Raise ConfigError if this machine has a GPU, but one without fp8 products."""
    from gpt2_triton import device

    if device.present():
        require_fp8(device.name(), device.architecture())


def require_rows(config: Config, tokenizer: str) -> None:
    """Raise ConfigError if a tokenizer's file has more tokens than the model has rows."""
    from gpt2_triton.data.tokenizer import NAMES, get_tokenizer

    if tokenizer in NAMES:
        return
    tokens = get_tokenizer(tokenizer).vocab_size
    rows = config.model.vocab_size
    if rows < tokens:
        raise ConfigError(
            f"model.vocab_size: the tokenizer {tokenizer} has {tokens:,} tokens, got {rows:,}; "
            f"set model.vocab_size to {tokens}"
        )


def check_run_dir(run_dir: Path | None, resume: Resume) -> None:
    """Raise ConfigError for a path that cannot be a run directory, and for one with checkpoints
    unless `resume`; CheckpointError for one without, if `resume` is "must".
    """
    if run_dir is None:
        if resume:
            raise ConfigError("--resume: needs --run_dir, the directory of the run to continue")
        return
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run_dir: {run_dir} is a file; expected a directory or a new name")
    real = run_dir.resolve()
    for directory in (real, *real.parents):
        if directory.name == "checkpoints" and list_steps(directory):
            raise ConfigError(
                f"--run_dir: {run_dir} is inside the run {directory.parent}; "
                "give it, or choose another"
            )
    places = (real / "checkpoints", real, *real.parents)
    there = next(path for path in places if os.path.exists(path))  # False without permission
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--run_dir: cannot write to {there}; choose another, or correct its permissions"
        )
    found = list_steps(run_dir / "checkpoints")
    if resume == "must" and not found:
        todo = "correct --run_dir, or give --resume alone to start a new run"
        with unmarked_by_errors(run_dir):
            raise CheckpointError(f"--resume must: {run_dir} has no checkpoint; {todo}")
    if found and not resume:
        last = found[-1][1].name
        raise ConfigError(
            f"--run_dir: {run_dir} has checkpoints up to {last}; add --resume, or choose another"
        )
    is_run = (run_dir / METRICS).exists() or (run_dir / RUN).exists()
    if (run_dir / "config.yaml").exists() and not (is_run or found):
        raise ConfigError(
            "--run_dir: a run would write over "
            f"{run_dir / 'config.yaml'}; move it, or choose another"
        )


@contextlib.contextmanager
def creating_run_dir(name: str, run_dir: Path | None) -> Iterator[Path]:
    """Make and yield the run's directory, by default runs/<name>-<time>[-N]; remove it
    at the end if it is empty.
    """
    named = run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = named
    for n in itertools.count(2):
        new = not path.exists()
        with contextlib.suppress(FileExistsError):  # another start in the same second
            # a link may name no directory yet
            path.resolve().mkdir(parents=True, exist_ok=run_dir is not None)
            break
        path = named.with_name(f"{named.name}-{n}")
    try:
        yield path
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
