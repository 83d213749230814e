"""Write and prune checkpoints.

A checkpoint is complete or absent at every moment:

    1. every rank writes and syncs its file in .step_N.tmp
    2. rank 0 writes and syncs state and manifest there
    3. one rename makes .step_N.tmp the checkpoint step_N
    4. only then older checkpoints, or the replaced one, are deleted: renamed to
       .step_N.old, and then removed

Where the disk has no room, step 4 comes first, but the newest intact checkpoint and its best stay.

One process at a time saves in a run (distributed/run_lock.py), so hidden directories
are leftovers of killed saves.
"""

import ctypes
import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
from gpt2_triton.checkpoint.load import best_checkpoint, verify
from gpt2_triton.checkpoint.source_files import DIRECTORY
from gpt2_triton.config.config import Config
from gpt2_triton.console import print_line
from gpt2_triton.data.tokenizer_file import CONFIG, FILE, IDENTITY
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.distributed.run_lock import is_anothers
from gpt2_triton.errors import CheckpointError, same_on_all_ranks
from gpt2_triton.files import copy_mode, free_space, fsync, remove

FILES_BYTES = 1 << 20  # above the size of state, manifest and the tensors' headers
TRIAL = "step_trial"  # no name of a step
# of Linux's renameat2: paths are of the working directory; two names are exchanged
AT_FDCWD = -100
RENAME_EXCHANGE = 2


class Retention(NamedTuple):
    """Which checkpoints stay, beside all after the newest save."""

    keep: int  # the newest; 0: all
    every: int = 0  # multiples of this step; 0: none
    rewind: int = 0  # the last two multiples of this step, to which a rewind may return; 0: none
    best: int | None = None  # the step of the lowest validation loss

    @classmethod
    def of(cls, config: Config) -> "Retention":
        """Return what a configuration keeps."""
        checkpoint = config.checkpoint
        return cls(
            checkpoint.keep, checkpoint.major, checkpoint.every if config.train.rewind_after else 0
        )

    def superseded(self, directory: Path, newest: int) -> list[Path]:
        """Return the checkpoints that do not stay once `newest` is saved, oldest first.

        Later ones are damaged: the run passed over them.
        """
        paths = {step: path for step, path in list_steps(directory) if step <= newest}
        steps = sorted({*paths, newest})
        kept = {self.best, *steps[-self.keep :]}
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        if self.rewind:
            last = newest // self.rewind * self.rewind
            kept |= {last, last - self.rewind}
        return [path for step, path in paths.items() if step not in kept]


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    retention: Retention,
    control: ControlGroup = SINGLE_PROCESS,
) -> Path:
    """Write the checkpoint of `step` under `directory`, replacing any, prune
    older ones, and return its path.

    All ranks of `control` call it with their shards as `tensors`; with several,
    state["shares"] has the shard's spans.  If any rank fails, all raise OSError, and the
    newest intact checkpoint is still there.
    """
    target = step_path(directory, step)
    staying = retention._replace(best=best_step(state))
    needed = control.size * _bytes_of(tensors)
    control.from_rank0(lambda: _make_room(directory, needed, step, staying))
    _write(target, tensors, {"format": FORMAT, "step": step} | state, control)
    control.from_rank0(lambda: _prune(directory, step, staying))
    return target


def try_to_save(directory: Path, control: ControlGroup = SINGLE_PROCESS) -> None:
    """Make a small checkpoint as a save does, and delete it; CheckpointError on all
    ranks if a step fails on one.

    So a file system without renames, or one that not all ranks see, ends a run at its start.
    """
    target = directory / TRIAL
    control.from_rank0(lambda: _remove_leftovers(directory))
    try:
        _write(target, {"params": torch.empty(1, device="cpu")}, {}, control)
        control.from_rank0(lambda: remove(target))
        failure = ""
    except OSError as error:
        failure = str(error)
    if control.rank == 0:
        with suppress(OSError):  # a run's own checkpoints are there
            directory.rmdir()
    if failure:
        control.leave()
        with same_on_all_ranks():
            raise CheckpointError(
                f"{directory}: no checkpoint can be saved there ({failure}); "
                "choose a --run_dir with room that every rank sees and may write to"
            )


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed saves left."""
    for leftover in directory.glob(".step_*"):
        remove(leftover)


def _make_room(directory: Path, needed: int, step: int, retention: Retention) -> None:
    """Remove what killed saves left, and what has to go before `needed` bytes fit."""
    run_dir = directory.parent
    if not run_dir.is_dir():  # the save makes it again: an error would lose more
        print_line(
            f"warning: {run_dir}: moved or removed during the run; "
            "checkpoints go to a new one; logs, tokenizer and earlier checkpoints stay with the "
            "other",
            error=True,
        )
    if is_anothers(run_dir):  # this save would delete its checkpoints
        raise OSError(
            errno.EEXIST, f"{run_dir} is another run; give this run's directory its name back"
        )
    _remove_leftovers(directory)
    for path in _in_the_way(directory, needed, step, retention):
        _discard(path)


def _in_the_way(directory: Path, needed: int, step: int, retention: Retention) -> list[Path]:
    """Return what to delete before `needed` bytes are written for `step`: nothing if they fit,
    else the oldest of what that save supersedes, but never the newest intact checkpoint or the
    best until then: the save may fail.  OSError if this is not enough.
    """
    free = free_space(directory)
    chosen = list[Path]()
    if free >= needed:
        return []
    earlier = [path for other, path in list_steps(directory) if other <= step]
    intact = next((path for path in reversed(earlier) if not verify(path)), None)
    spared = {intact, best_checkpoint(intact) if intact else None}
    for path in retention.superseded(directory, step):
        if free < needed and path not in spared:
            free += sum(file.stat().st_size for file in path.iterdir())
            chosen.append(path)
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed:,} bytes needed, {free:,} free"
        )
    return chosen


def _write(
    target: Path, tensors: dict[str, Tensor], state: dict[str, Any], control: ControlGroup
) -> None:
    """Make the checkpoint `target` by the steps 1 to 3."""
    temporary = target.with_name(f".{target.name}.tmp")
    control.from_rank0(lambda: temporary.mkdir(parents=True))
    try:
        results = _write_shards(temporary, tensors, state, control)
        control.from_rank0(lambda: _finish(temporary, state, results))
        control.from_rank0(lambda: _publish(temporary, target))
    except BaseException:
        if control.rank == 0:
            remove(temporary)
        raise


def _write_shards(
    temporary: Path, tensors: dict[str, Tensor], state: dict[str, Any], control: ControlGroup
) -> list[dict[str, Any]]:
    """Write and sync this rank's file; return every rank's spans and entry in the manifest."""
    path = temporary / tensors_name(control.rank)
    result: dict[str, Any] = {
        "spans": {key: state[key] for key in (SHARES, SECOND_SHARES) if key in state}
    }
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
    _copy_tokenizer(temporary, state)
    manifest = {tensors_name(rank): result["entry"] for rank, result in enumerate(results)}
    for name in manifest:
        copy_mode(temporary / STATE, temporary / name)
    manifest[STATE] = fingerprint(temporary / STATE)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (temporary / STATE, temporary / MANIFEST, temporary):
        fsync(path)


def _copy_tokenizer(temporary: Path, state: dict[str, Any]) -> None:
    """Copy the run's tokenizer file beside the tensors: a checkpoint may go alone elsewhere."""
    name = state.get("config", {}).get("data", {}).get("tokenizer", "")
    source = temporary.parent.parent / DIRECTORY
    if name.startswith(IDENTITY):
        for file in (FILE, CONFIG):
            if (source / file).is_file():
                shutil.copyfile(source / file, temporary / file)
                fsync(temporary / file)


def _publish(temporary: Path, target: Path) -> None:
    """Rename the complete `temporary` to `target`, once; a checkpoint in its place is removed."""
    replaced = temporary
    if not os.path.lexists(target):
        os.rename(temporary, target)
    elif not _exchange(temporary, target):
        replaced = temporary.with_suffix(".old")
        os.rename(target, replaced)
        os.rename(temporary, target)
    fsync(target.parent)
    fsync(target.parent.parent)  # the first save of a run creates target.parent
    remove(replaced)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; return False, with nothing done, where that fails, as on NFS."""
    first = AT_FDCWD, os.fsencode(one)
    second = AT_FDCWD, os.fsencode(other)
    return ctypes.CDLL(None).renameat2(*first, *second, RENAME_EXCHANGE) == 0


def require_space(
    directory: Path, tensors: dict[str, Tensor], step: int, best: int | None, config: Config
) -> None:
    """Raise CheckpointError unless a checkpoint of these tensors fits after `step`:
    at the start, not hours later.

    Print a warning if a first one fits, but not a second one beside it.
    """
    size = _bytes_of(tensors)
    retention = Retention.of(config)._replace(best=best)
    try:
        _in_the_way(directory, size, step + 1, retention)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: no room for a checkpoint: {error.strerror}; "
            "make room, or change --run_dir"
        ) from None
    saves_again = 0 < config.checkpoint.every < config.train.steps
    if saves_again and not list_steps(directory) and free_space(directory) < 2 * size - FILES_BYTES:
        print_line(
            f"warning: {directory}: room for one checkpoint alone: later saves will fail, "
            "since the first stays until the second is whole; make room",
            error=True,
        )


def _bytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values()) + FILES_BYTES


# ---- deleting ----


def discard_after(directory: Path, step: int) -> None:
    """Delete the checkpoints after `step`: a rewind to `step` has made them another run's."""
    for later, path in list_steps(directory):
        if later > step:
            _discard(path)


def _prune(directory: Path, newest: int, retention: Retention) -> None:
    for path in retention.superseded(directory, newest):
        try:
            _discard(path)
        except OSError as error:  # the new checkpoint is complete
            print_line(
                f"warning: {path}: cannot be deleted ({error.strerror}); it stays", error=True
            )


def _discard(path: Path) -> None:
    """Delete a checkpoint, renamed first: a kill leaves no partial checkpoint under its name."""
    hidden = path.with_name(f".{path.name}.old")
    os.rename(path, hidden)
    remove(hidden)
