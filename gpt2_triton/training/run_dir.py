"""The run directory at the start of a run: lock it, find its newest checkpoint, keep the
logs of an earlier start.
"""

import contextlib
from pathlib import Path

from gpt2_triton.checkpoint.load import latest_checkpoint
from gpt2_triton.console import print_line
from gpt2_triton.distributed.run_lock import lock_run_dir
from gpt2_triton.errors import ConfigError
from gpt2_triton.training.metrics import METRICS, STATS, read_metrics
from gpt2_triton.training.preemption import unmarked_by_errors
from gpt2_triton.training.start import Resume


def open_run_dir(run_dir: Path, resume: Resume, held: contextlib.ExitStack) -> Path | None:
    """Lock `run_dir` until `held` closes.  Return the newest intact
    checkpoint, or None to start a new run.

    ConfigError if another process writes to `run_dir`, or if it has metrics but no checkpoint
    and `resume` is False.  CheckpointError if all checkpoints are damaged.
    """
    held.enter_context(lock_run_dir(run_dir))
    held.enter_context(unmarked_by_errors(run_dir))
    found = latest_checkpoint(run_dir / "checkpoints") if resume else None
    if found is None:
        _begin(run_dir, resume)
    return found


def _begin(run_dir: Path, resume: Resume) -> None:
    """Begin a new run; keep aside the logs of an earlier start that saved no checkpoint."""
    metrics = run_dir / METRICS
    logged = metrics.exists() and metrics.stat().st_size > 0
    if logged and not resume:
        last = max((record["step"] for record in read_metrics(metrics)), default=0)
        todo = "add --resume to keep them aside and start again, or choose another"
        raise ConfigError(
            f"--run_dir: {run_dir} has metrics up to step {last}, but no checkpoint; {todo}"
        )
    if resume:
        kept = ""
        if logged:
            names = _keep_aside(run_dir)
            kept = f"; the logs of an earlier start, without a checkpoint, are now {names}"
        print_line(f"nothing to resume in {run_dir}: starting a new run{kept}")


def _keep_aside(run_dir: Path) -> str:
    """Rename the logs with the first free number, such as metrics.jsonl.1; return the new names."""
    names = [name for name in (METRICS, STATS) if (run_dir / name).exists()]
    number = 1
    while any((run_dir / f"{name}.{number}").exists() for name in names):
        number += 1
    for name in names:
        (run_dir / name).rename(run_dir / f"{name}.{number}")
    return ", ".join(f"{name}.{number}" for name in names)
