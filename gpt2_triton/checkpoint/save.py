"""Write and prune checkpoints.

A checkpoint is complete or absent at every moment:

    1. every rank writes and syncs its file in .step_N.tmp
    2. rank 0 writes and syncs state and manifest there
    3. one rename makes .step_N.tmp the checkpoint step_N
    4. only then older checkpoints, or the replaced one, are deleted: renamed to .step_N.old, and then removed

One process at a time saves in a run (distributed/run_lock.py), so hidden directories are leftovers of killed saves.
"""

import ctypes
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gpt2_triton.checkpoint.format import (
    FORMAT,
    MANIFEST,
    SECOND_SHARES,
    SHARES,
    STATE,
    best_step,
    fingerprint,
    list_steps,
    step_path,
    tensors_name,
)
from gpt2_triton.console import print_line
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import CheckpointError
from gpt2_triton.files import fsync, missing_space, remove

FILES_BYTES = 1 << 20  # above the size of state, manifest and the tensors' headers


class Retention(NamedTuple):
    """Which checkpoints stay, beside the best and all after the newest save."""

    keep: int  # the newest; 0: all
    every: int = 0  # multiples of this step; 0: none
    rewind: int = 0  # the last two multiples of this step, to which a rewind may return; 0: none


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    retention: Retention,
    control: ControlGroup = SINGLE_PROCESS,
) -> Path:
    """Write the checkpoint of `step` under `directory`, replacing any, prune older ones, and return its path.

    All ranks of `control` call it with their shards as `tensors`; with several, state["shares"] has the shard's spans.
    If any rank fails, all raise OSError, and nothing has changed.
    """
    target, temporary = step_path(directory, step), directory / f".step_{step:08d}.tmp"
    control.from_rank0(lambda: _begin(temporary, tensors, control.size))
    try:
        results = _write_shards(temporary, tensors, state, control)
        control.from_rank0(lambda: _finish(temporary, {"format": FORMAT, "step": step} | state, results))
        control.from_rank0(lambda: _publish(temporary, target))
    except BaseException:
        if control.rank == 0:
            remove(temporary)
        raise
    control.from_rank0(lambda: _prune(directory, step, best_step(state), retention))
    return target


def _begin(temporary: Path, tensors: dict[str, Tensor], ranks: int) -> None:
    """Remove what killed saves left, and make the directory to write into."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for leftover in temporary.parent.glob(".step_*"):
        remove(leftover)
    if missing := missing_space(temporary.parent, ranks * _bytes_of(tensors)):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {missing}")
    temporary.mkdir()


def _write_shards(
    temporary: Path, tensors: dict[str, Tensor], state: dict[str, Any], control: ControlGroup
) -> list[dict[str, Any]]:
    """Write and sync this rank's file; return every rank's spans and entry in the manifest."""
    path = temporary / tensors_name(control.rank)
    result: dict[str, Any] = {"spans": {key: state[key] for key in (SHARES, SECOND_SHARES) if key in state}}
    try:
        save_file(tensors, path)
        fsync(path)
        result["entry"] = fingerprint(path)
    except (OSError, SafetensorError) as error:
        result["error"] = f"rank {control.rank}: {error}"
    results = control.all_gather(result)
    if errors := [result["error"] for result in results if "error" in result]:
        raise OSError(errors[0])
    return results


def _finish(temporary: Path, state: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write state and manifest, and sync them and the directory."""
    if len(results) > 1:
        state |= {key: [result["spans"][key] for result in results] for key in results[0]["spans"]}
    (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    manifest = {tensors_name(rank): result["entry"] for rank, result in enumerate(results)}
    for name in manifest:
        shutil.copymode(temporary / STATE, temporary / name)  # safetensors makes its files private
    manifest[STATE] = fingerprint(temporary / STATE)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (temporary / STATE, temporary / MANIFEST, temporary):
        fsync(path)


def _publish(temporary: Path, target: Path) -> None:
    """Make the complete `temporary` the checkpoint `target` by one rename; a checkpoint in its place is removed."""
    replaced = temporary
    if not os.path.lexists(target):
        os.rename(temporary, target)
    elif not _exchange(temporary, target):
        os.rename(target, replaced := temporary.with_suffix(".old"))
        os.rename(temporary, target)
    fsync(target.parent)
    fsync(target.parent.parent)  # the first save of a run creates target.parent
    remove(replaced)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; return False, with nothing done, where the system cannot, as on NFS."""
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return ctypes.CDLL(None).renameat2(here, os.fsencode(one), here, os.fsencode(other), flag) == 0


def require_space(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError if a checkpoint of these tensors would not fit: at the start of a run, not hours later."""
    if missing := missing_space(directory, _bytes_of(tensors)):
        raise CheckpointError(f"{directory}: no room for a checkpoint: {missing}; make room, or change --run_dir")


def _bytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values()) + FILES_BYTES


# ---- deleting ----


def discard_after(directory: Path, step: int) -> None:
    """Delete the checkpoints after `step`: a rewind to `step` has made them another run's."""
    for later, path in list_steps(directory):
        if later > step:
            _discard(path)


def _prune(directory: Path, newest: int, best: int | None, retention: Retention) -> None:
    """Delete the checkpoints that `retention` does not keep.  Later ones are damaged: the run passed over them."""
    steps = {step: path for step, path in list_steps(directory) if step <= newest}
    kept = {best, *[*steps][-retention.keep :]}
    if retention.every:
        kept |= {step for step in steps if step % retention.every == 0}
    if retention.rewind:
        last = newest // retention.rewind * retention.rewind
        kept |= {last, last - retention.rewind}
    for step in steps.keys() - kept:
        try:
            _discard(steps[step])
        except OSError as error:  # the new checkpoint is complete
            print_line(f"warning: {steps[step]}: cannot be deleted ({error.strerror}); it stays", error=True)


def _discard(path: Path) -> None:
    """Delete a checkpoint.  The rename comes first, so that a kill leaves no partial checkpoint under its name."""
    hidden = path.with_name(f".{path.name}.old")
    os.rename(path, hidden)
    remove(hidden)
