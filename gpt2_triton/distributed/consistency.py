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


def require_shared_run_dir(run_dir: Path, control: ControlGroup, seconds: float = 5.0) -> None:
    """Raise ConfigError, naming the ranks, if ranks do not see rank 0's run directory, or cannot write there.

    Such a rank's shards would be missing from checkpoints.  Rank 0 makes a file; the others look for it for `seconds`.
    """
    if control.size == 1:
        return
    path = run_dir / control.from_rank0(lambda: f".seen.{secrets.token_hex(4)}.tmp")
    control.from_rank0(path.touch)
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    able = control.all_gather(path.exists() and os.access(run_dir, os.W_OK))
    control.from_rank0(lambda: path.unlink(missing_ok=True))
    if unable := [rank for rank, is_able in enumerate(able) if not is_able]:
        control.leave()
        raise ConfigError(f"--run_dir: ranks {unable} do not see {run_dir}, or cannot write there; share it with them")


def require_equal(control: ControlGroup, **values: Any) -> None:
    """Raise ConfigError, naming the ranks, if a JSON value differs from rank 0's value.

    Without this check a node with an older configuration or a missing shard would train without an error.
    """
    for what, value in values.items():
        found = control.all_gather(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest())
        if others := [rank for rank, other in enumerate(found) if other != found[0]]:
            control.leave()
            raise ConfigError(f"{what}: not the same on ranks {others} as on rank 0; copy the same files to every node")
