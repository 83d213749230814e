"""The start of a run: what is refused before torch is imported, and the run's directory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.errors import ConfigError


@contextlib.contextmanager
def starting(config: Config, run_dir: Path | None, resume: bool) -> Iterator[None]:
    """Check the configuration on this rank, and on rank 0, which has a `run_dir`, the data's tokenizer and the
    directory, which is made.
    """
    from gpt2_triton.data.shards import require_tokenizer

    StepShape.of(config, rank_and_size()[1])  # refuses another parallel.gpus before the run has a directory
    if run_dir is None:
        yield
        return
    check_run_dir(run_dir, resume)
    for split in (config.data.train, config.data.val):
        require_tokenizer(split, config.data.tokenizer)
    with creating_run_dir(run_dir):
        yield


def check_run_dir(run_dir: Path, resume: bool) -> None:
    """Raise ConfigError for a file, and, unless `resume`, for a directory with checkpoints."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run_dir: {run_dir} is a file; expected a directory or a new name")
    found = sorted((run_dir / "checkpoints").glob("step_*"))
    if found and not resume:
        raise ConfigError(
            f"--run_dir: {run_dir} has checkpoints up to {found[-1].name}; add --resume, or choose another"
        )


@contextlib.contextmanager
def creating_run_dir(run_dir: Path) -> Iterator[None]:
    """Make the run's directory, and remove it at the end if it is new and still empty, as after a refused start."""
    try:
        new = not run_dir.exists()
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run_dir: cannot make {run_dir}: {error.strerror}; choose another") from error
    try:
        yield
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty
                run_dir.rmdir()
