"""Consistency checks across ranks: the run directory, the configuration and the data at start-up, errors at the end."""

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.errors import ConfigError, PeerLostError, UserError
from gpt2_triton.files import process_mark


@contextlib.contextmanager
def comparing_errors(control: ControlGroup) -> Iterator[None]:
    """Record on a UserError whether every rank raises it; not on PeerLostError, after which ranks are missing."""
    try:
        yield
    except UserError as error:
        error.on_every_rank = error.exit_code != PeerLostError.exit_code and control.is_raised_by_all(str(error))
        raise


def require_shared_run_dir(run_dir: Path, control: ControlGroup, seconds: float = 5.0) -> None:
    """Raise ConfigError with the ranks that do not see rank 0's run directory, or cannot write to it.

        rank 0      create the file .seen.TOKEN.MARK.tmp; all_gather its name
        rank r      wait until run_dir has rank 0's file, at most `seconds`, for a network file system to show it
                    create a file of its own and remove it
        all ranks   all_gather what was wrong
        rank 0      remove the file

    Otherwise the first checkpoint would be incomplete, or the first that fails.
    """
    if control.size == 1:
        return
    own, end = run_dir / f".seen.{secrets.token_hex(4)}.{process_mark()}.tmp", time.monotonic() + seconds
    wrong = _write_error(run_dir, own.touch) if control.rank == 0 else ""
    name, no_file = control.all_gather([own.name, wrong])[0]
    while not (seen := no_file or (run_dir / name).exists()) and time.monotonic() < end:
        time.sleep(0.1)
    if control.rank > 0:
        wrong = _write_error(run_dir, own.touch, own.unlink) if seen else f"do not see {run_dir}"
    answers = control.all_gather(wrong)
    if control.rank == 0 and not no_file:
        own.unlink()
    problems = sorted({*answers} - {""})
    found = [f"ranks {[rank for rank, answer in enumerate(answers) if answer == p]} {p}" for p in problems]
    if found:
        raise ConfigError(f"--run_dir: {'; '.join(found)}; give one that all nodes see and may write to")


def _write_error(directory: Path, *actions: Callable[[], None]) -> str:
    """Perform the actions in the directory; return the error of the first that fails, or ""."""
    try:
        for action in actions:
            action()
    except OSError as error:
        return f"cannot write to {directory} ({error.strerror})"
    return ""


def require_equal(control: ControlGroup, **values: Any) -> None:
    """Raise ConfigError with the ranks that differ from rank 0, unless each value, of JSON, is the same on all.

    Otherwise a node with an older configuration or a missing shard would train without an error.
    """
    for what, value in values.items():
        found = control.all_gather(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest())
        if others := [rank for rank, other in enumerate(found) if other != found[0]]:
            raise ConfigError(f"{what}: not the same on ranks {others} as on rank 0; copy the same files to every node")
