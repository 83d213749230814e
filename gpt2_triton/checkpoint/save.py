"""Write and prune checkpoints.

All files are written to a hidden directory and synced; then one rename publishes the checkpoint, so that a crash leaves
a complete checkpoint or none.  Older checkpoints, and one that is replaced, are deleted only after that.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gpt2_triton import files
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
from gpt2_triton.checkpoint.load import saved_step, verify
from gpt2_triton.checkpoint.resume import config_differences
from gpt2_triton.checkpoint.tensor_file import Progress, write_tensors
from gpt2_triton.console import print_line
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import CheckpointError
from gpt2_triton.files import MARK, exchange, fsync, process_mark, remove, remove_abandoned

WAITING = "waiting for the files of other ranks"
FILES_BYTES = 1 << 20  # more than state, manifest and the header of the tensors take
HIDDEN_NAME = re.compile(r"\.step_[0-9]{8,}\.(?:tmp|old)-" + MARK)


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    keep: int,
    keep_every: int = 0,
    rewind_every: int = 0,
    control: ControlGroup = SINGLE_PROCESS,
    progress: Progress = lambda what, nbytes: None,
    own: bool = True,
    damaged: Collection[int] = (),
) -> Path:
    """Write the checkpoint of `step` under `directory`, prune older ones, return its path.

    Keep the `keep` newest (0: all), multiples of `keep_every` (0: none), the last two multiples of `rewind_every`
    (0: none), to which a rewind may return, and the steps of state["best"], of `state` and of those two.

    All ranks of `control` call it.  `tensors` is each rank's shard; with several ranks state["shares"] holds the
    shard's spans.  If any rank fails, all ranks raise OSError.  `progress` is told what this rank does.

    `own`: the process has read or written this step before.  Then nothing is written if the checkpoint exists, verifies
    and has this state.  Any other directory of its name is replaced, after a warning unless `own` and it verifies.
    `damaged`: steps that the run did not resume from, which neither count nor are deleted.
    """
    target, state = step_path(directory, step), {"format": FORMAT, "step": step} | state
    temporary = control.from_rank0(lambda: _begin(directory, target, tensors, state, control.size, own))
    if temporary:
        _write(target, Path(temporary), tensors, state, control, progress)
        control.from_rank0(lambda: _prune(directory, step, keep, keep_every, rewind_every, best_step(state), damaged))
    return target


def _begin(
    directory: Path, target: Path, tensors: dict[str, Tensor], state: dict[str, Any], ranks: int, own: bool
) -> str | None:
    """Create the directory to write into and return it; None if nothing is to be written."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_abandoned(directory, HIDDEN_NAME, own=True)  # a process writes one checkpoint at a time
    if target.exists():
        intact = own and not verify(target)
        if intact and _has_state(target, state):
            return None
        if not intact:
            print_line(f"warning: {target}: damaged, or not this step of this run: it is replaced", error=True)
    if missing := missing_space(directory, tensors, ranks):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {missing}")
    temporary = _hidden(target, "tmp")
    temporary.mkdir()
    return str(temporary)


def _has_state(target: Path, state: dict[str, Any]) -> bool:
    """Return whether a checkpoint that verifies has this state.  The tensors do not depend on the number of ranks, free
    keys of the configuration and the times of the data's files, which may be others.
    """
    saved, now = json.loads((target / STATE).read_text(encoding="utf-8")), json.loads(json.dumps(state))
    same_run = not config_differences(saved.get("config", {}), now.get("config", {}))[0]
    varying = dict.fromkeys((SHARES, SECOND_SHARES, "config", "data_times"))
    return same_run and saved | varying == now | varying


def _write(
    target: Path,
    temporary: Path,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    control: ControlGroup,
    progress: Progress,
) -> None:
    """Write this rank's file; rank 0 writes the others and renames once all ranks have succeeded."""
    try:
        path, error = temporary / tensors_name(control.rank), None
        entry: dict[str, Any] = {"spans": {key: state[key] for key in (SHARES, SECOND_SHARES) if key in state}}
        try:
            progress(f"writing {path.name}", 0)
            entry |= write_tensors(path, tensors, progress)
        except OSError as raised:
            error, entry["error"] = raised, f"rank {control.rank}: {raised}"
        progress(WAITING, 0)
        entries = control.all_gather(entry)
        if errors := [entry["error"] for entry in entries if "error" in entry]:
            raise error or OSError(errors[0])
        if control.rank == 0:
            progress(f"publishing {target.name}", 0)
        control.from_rank0(lambda: _publish(target, temporary, state, entries))
    except BaseException:
        if control.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _publish(target: Path, temporary: Path, state: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    """Write state and manifest, sync, and rename `temporary` to `target`."""
    spans = [entry.pop("spans") for entry in entries]
    state = state | {key: [of_rank[key] for of_rank in spans] for key in spans[0] if len(spans) > 1}
    (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    manifest = {tensors_name(rank): entry for rank, entry in enumerate(entries)}
    manifest[STATE] = fingerprint(temporary / STATE)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (temporary / STATE, temporary / MANIFEST, temporary):
        fsync(path)
    replaced = temporary
    if not target.exists():
        os.rename(temporary, target)
    else:
        if not exchange(temporary, target):
            replaced = _hidden(target, "old")
            os.rename(target, replaced)
            os.rename(temporary, target)
    fsync(target.parent)
    fsync(target.parent.parent)  # the first save of a run creates target.parent
    remove(replaced)  # the next save removes what a kill leaves


def _hidden(step_dir: Path, kind: Literal["tmp", "old"]) -> Path:
    """Return the path at which this process writes ("tmp") or deletes ("old") a checkpoint."""
    return step_dir.with_name(f".{step_dir.name}.{kind}-{process_mark()}")


def require_space(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError if a checkpoint of these tensors would not fit: at the start of a run, not hours later."""
    if missing := missing_space(directory, tensors):
        raise CheckpointError(f"{directory}: no room for a checkpoint: {missing}; make room, or change --run_dir")


def missing_space(directory: Path, tensors: dict[str, Tensor], ranks: int = 1) -> str | None:
    """Return the bytes needed and free if `ranks` files of these tensors do not fit; `directory` need not exist."""
    missing = files.missing_space(directory, ranks * sum(t.nbytes for t in tensors.values()) + FILES_BYTES)
    return f"{missing[0]:,} bytes needed, {missing[1]:,} free" if missing else None


# ---- deleting ----


def discard_after(directory: Path, step: int) -> None:
    """Delete the checkpoints after `step`: a rewind to `step` has made them another run's."""
    for later, path in list_steps(directory):
        if later > step:
            _discard(path)


def _prune(
    directory: Path,
    newest: int,
    keep: int,
    keep_every: int,
    rewind_every: int,
    best: int | None,
    damaged: Collection[int] = (),
) -> None:
    """Delete the steps up to `newest` that `save_checkpoint` need not keep.  A later step is a damaged one too, and
    does not count, nor does one whose state is of another step.
    """
    steps = []
    for step, path in list_steps(directory):
        if step > newest or step in damaged:
            continue
        if saved_step(path) == step:
            steps.append((step, path))
        else:
            print_line(f"warning: {path}: its state is not of this step: it does not count", error=True)
    kept = {best}
    if rewind_every:
        last = newest // rewind_every * rewind_every
        targets = {last, last - rewind_every}
        kept |= targets | {_best_of(path) for step, path in steps if step in targets}
    for step, path in steps[:-keep] if keep else []:
        if not (keep_every and step % keep_every == 0) and step not in kept:
            try:
                _discard(path)
            except FileNotFoundError:  # someone else has removed it
                pass
            except OSError as error:  # the new checkpoint is complete
                print_line(f"warning: {path}: cannot be deleted ({error.strerror}); it stays", error=True)


def _best_of(step_dir: Path) -> int | None:
    """Return the step of the lowest validation loss by the state of a checkpoint; None if it cannot be read."""
    try:
        return best_step(json.loads((step_dir / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _discard(path: Path) -> None:
    """Delete a checkpoint.  It is renamed first, so that a kill leaves no partial checkpoint under its name."""
    hidden = _hidden(path, "old")
    os.rename(path, hidden)
    remove(hidden)  # the next save removes what is left
