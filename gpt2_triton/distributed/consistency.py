"""Consistency checks across ranks at start-up: the run directory, the configuration and the data."""

import hashlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import run_dir_error


def require_shared_run_dir(run_dir: Path, control: ControlGroup, seconds: float = 5.0) -> None:
    """Raise ConfigError, naming the ranks, if ranks do not see rank 0's run directory or cannot write to it.

    Such a rank's shards would be missing from checkpoints.  Rank 0 makes a file; the others look for it for `seconds`.
    Each rank that sees the file then makes and removes a file of its own.
    """
    if control.size == 1:
        return
    name = f".seen.{secrets.token_hex(4)}.tmp"
    path, end = run_dir / control.from_rank0(lambda: _make(run_dir, name)), time.monotonic() + seconds
    while not os.path.exists(path) and time.monotonic() < end:  # Path.exists raises without permission
        time.sleep(0.1)
    answers = control.all_gather(_write_error(run_dir) if os.path.exists(path) else f"do not see {run_dir}")
    if control.rank == 0:
        path.unlink(missing_ok=True)
    wrong = {answer: [rank for rank, other in enumerate(answers) if other == answer] for answer in answers if answer}
    if wrong:
        control.leave()
        found = "; ".join(f"ranks {ranks} {answer}" for answer, ranks in wrong.items())
        raise ConfigError(f"--run_dir: {found}; give a directory that all nodes see and may write to")


def _make(run_dir: Path, name: str) -> str:
    try:
        (run_dir / name).touch()
    except OSError as error:
        raise run_dir_error(run_dir, error) from error
    return name


def _write_error(run_dir: Path) -> str:
    """Make and remove a file; return in words why that is not possible, or ""."""
    own = run_dir / f".seen.{secrets.token_hex(4)}.tmp"
    try:
        own.touch()
        own.unlink(missing_ok=True)
    except OSError as error:
        return f"cannot write to {run_dir} ({error.strerror})"
    return ""


def require_equal(control: ControlGroup, **values: Any) -> None:
    """Raise ConfigError, naming the ranks, if a JSON value differs from rank 0's value.

    Without this check a node with an older configuration or a missing shard would train without an error.
    """
    for what, value in values.items():
        found = control.all_gather(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest())
        if others := [rank for rank, other in enumerate(found) if other != found[0]]:
            control.leave()
            raise ConfigError(f"{what}: not the same on ranks {others} as on rank 0; copy the same files to every node")
