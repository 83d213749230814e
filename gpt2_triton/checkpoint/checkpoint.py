"""Checkpoints that survive any crash: RUN/checkpoints/step_NNNNNNNN/ with one safetensors file a rank and a manifest.

Each rank writes its share of every tensor, rank 0 the rest, once all shares are on disk; state.json says which stretch
of the flat order lies where, so that any number of ranks can read what any other number wrote.

A checkpoint is written into a hidden directory beside its place, every file synced, and then put in place by one
rename: it is there whole or not at all.  manifest.json holds the size and sha256 of the other files, so a flipped bit
is noticed; safetensors itself would load it.  Older checkpoints go only after the new one is in place.  Nothing is ever
unpickled, and the names of files come from the rules below, never from a file's text.
"""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2_triton.checkpoint import best
from gpt2_triton.checkpoint.checks import first_non_finite, missing_space
from gpt2_triton.checkpoint.shares import join, tile
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import CheckpointError
from gpt2_triton.files import fsync, remove_abandoned, sha256

FORMAT = 2  # 1 had no window of losses and norms
STATE, MANIFEST = "state.json", "manifest.json"
_STEP = re.compile(r"step_([0-9]{8,})")
_RANK = re.compile(r"rank_[0-9]{5}\.safetensors")
_HIDDEN = re.compile(r"\.step_[0-9]{8,}\.(?:tmp|old)-([0-9]+)")  # being written or deleted by that process


# ---- writing ----


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    keep: int,
    major: int,
    back: int = 0,
    control: ControlGroup = SINGLE_PROCESS,
) -> Path:
    """Write the checkpoint of `step` under `directory`; then keep the `keep` newest (0: all), multiples of `major`, the
    last two multiples of `back` (0: none), which a rewind may go back to, and the best by state["best"].

    All ranks of the control call it, each with its share in `tensors` and, if there are several, with the share's spans
    in state["shares"].  Returns its path; if it is there already and verifies, nothing is written.  A failure is
    OSError or SafetensorError, on every rank.
    """
    target = directory / f"step_{step:08d}"
    temporary = control.from_rank0(lambda: _begin(directory, target, tensors, control.size))
    if temporary:
        _write(target, Path(temporary), tensors, state, control)
        control.from_rank0(lambda: _prune(directory, step, keep, major, back, best.step_of(state)))
    return target


def _begin(directory: Path, target: Path, tensors: dict[str, Tensor], shares: int) -> str | None:
    """The directory to write into; None if the checkpoint is there."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_abandoned(directory, _HIDDEN, own=True)  # a process writes one checkpoint at a time, and now begins
    if target.exists() and not verify(target):
        return None
    if lack := missing_space(directory, tensors, shares):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {lack}")
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    return str(temporary)


def _write(
    target: Path, temporary: Path, tensors: dict[str, Tensor], state: dict[str, Any], control: ControlGroup
) -> None:
    try:
        name, error = tensors_name(control.rank), None
        written: dict[str, Any] = {"spans": state.get("shares")}
        try:
            save_file(tensors, temporary / name)
            fsync(temporary / name)
            written |= _fingerprint(temporary / name)
        except (OSError, SafetensorError) as raised:
            error, written["error"] = raised, f"rank {control.rank}: {raised}"
        everyone = control.all_gather(written)
        if failed := [entry["error"] for entry in everyone if "error" in entry]:
            raise error or OSError(failed[0])
        control.from_rank0(lambda: _finish(target, temporary, state, everyone))
    except BaseException:
        if control.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _finish(target: Path, temporary: Path, state: dict[str, Any], written: list[dict[str, Any]]) -> None:
    """Rank 0's part: the other two files, and the rename."""
    spans = [entry.pop("spans") for entry in written]
    state = {"format": FORMAT} | state | ({"shares": spans} if len(spans) > 1 else {})
    (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    manifest = {tensors_name(rank): entry for rank, entry in enumerate(written)}
    manifest[STATE] = _fingerprint(temporary / STATE)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (temporary / STATE, temporary / MANIFEST, temporary):
        fsync(path)
    if target.exists():
        _discard(target)  # it does not verify
    os.rename(temporary, target)
    fsync(target.parent)
    fsync(target.parent.parent)  # the first save of a run made target.parent


def tensors_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def require_space(directory: Path, tensors: dict[str, Tensor]) -> None:
    """CheckpointError if a checkpoint of these tensors would not fit: for the start of a run, not after its hours."""
    if lack := missing_space(directory, tensors):
        raise CheckpointError(f"{directory}: no room for a checkpoint: {lack}; make room or choose another --run_dir")


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _discard(path: Path) -> None:
    """Delete a checkpoint: one rename hides it, so that a kill here leaves no half of one."""
    hidden = path.with_name(f".{path.name}.old-{os.getpid()}")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # what stays is removed with the abandoned ones


def _prune(directory: Path, newest: int, keep: int, major: int, back: int, kept: int | None) -> None:
    """Keep what `save` says of steps up to `newest`; a later one is damaged, or the run would have gone on from it."""
    steps = [(step, path) for step, path in _steps(directory) if step <= newest]
    wanted = {kept} | ({newest // back * back, newest // back * back - back} if back else set())
    for step, path in steps[:-keep] if keep else []:
        if not (major and step % major == 0) and step not in wanted:
            _discard(path)


def discard_after(directory: Path, step: int) -> None:
    """Delete the checkpoints of later steps: the run has gone back to `step`, and what follows is another history."""
    for later, path in _steps(directory):
        if later > step:
            _discard(path)


# ---- reading ----


def verify(step_dir: Path) -> list[str]:
    """What is wrong with a checkpoint, a line a problem; empty if its files are exactly those that were written."""
    try:
        return list(_problems(step_dir))
    except OSError as error:
        return [f"cannot be read ({error})"]


def _problems(step_dir: Path) -> Iterator[str]:
    if step_dir.is_symlink() or not step_dir.is_dir():
        yield "is missing or not a directory"
        return
    regular = {path.name: path.is_file() and not path.is_symlink() for path in step_dir.iterdir()}
    try:
        manifest = _read_json(step_dir / MANIFEST) if regular.get(MANIFEST) else {}
    except CheckpointError:
        manifest = {}
    whole = manifest.keys() == {*map(tensors_name, range(len(manifest) - 1)), STATE}  # else go by what is there
    ranks = len(manifest) - 1 if whole else sum(_RANK.fullmatch(name) is not None for name in regular)
    files = [*map(tensors_name, range(max(ranks, 1))), STATE]
    for extra in sorted(regular.keys() - {*files, MANIFEST}):
        yield f"{extra}: does not belong there"
    irregular = [name for name in (*files, MANIFEST) if not regular.get(name)]
    yield from (f"{name}: is missing or not a regular file" for name in irregular)
    if not irregular:
        yield from _differences_from_manifest(step_dir, files, manifest)


def _differences_from_manifest(step_dir: Path, files: list[str], manifest: dict[str, Any]) -> Iterator[str]:
    if manifest.keys() != set(files) or not all(isinstance(entry, dict) for entry in manifest.values()):
        yield f"{MANIFEST}: is not a JSON object about {' and '.join(files)} and nothing else"
        return
    for name in files:
        for key, found in _fingerprint(step_dir / name).items():
            if found != manifest[name].get(key):
                yield f"{name}: its {key} is {found!r}, {MANIFEST} says {manifest[name].get(key)!r}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error}); choose another step") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(content).__name__}; choose another step")
    return content


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything that is named like a checkpoint, oldest first."""
    if not directory.is_dir():
        return []
    return sorted((int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name)))


def latest(run_dir: Path) -> Path | None:
    """A run's newest checkpoint that verifies, with a warning for each damaged newer one; None if it has none."""
    return _newest(run_dir / "checkpoints")


def _newest(directory: Path) -> Path | None:
    steps = _steps(directory)
    for _, path in reversed(steps):
        problems = verify(path)
        if not problems:
            return path
        print(f"warning: {path} is damaged and passed over: {problems[0]}", file=sys.stderr, flush=True)
    if steps:  # None would mean a fresh start, over what might be restored
        raise CheckpointError(f"{directory}: none of {len(steps)} verifies; restore one, or use another --run_dir")
    return None


def find(path: Path) -> Path:
    """The checkpoint meant by `path`: a step directory, the newest good one of a run (or its checkpoints), or RUN/best,
    that of the lowest validation loss.
    """
    if path.name == "best" and not path.exists():
        step = best.step_of(_read_json(find(path.parent) / STATE))
        if step is None:
            wrong = f"{path}: {path.parent} keeps no best checkpoint"
            raise CheckpointError(f"{wrong}; train with --checkpoint.best val_loss")
        return find(path.parent / "checkpoints" / f"step_{step:08d}")
    if _STEP.fullmatch(path.absolute().name):
        problems = verify(path)
        if problems:
            others = ", ".join(other.name for _, other in _steps(path.absolute().parent) if other.name != path.name)
            raise CheckpointError(f"{path}: {problems[0]}; choose another step{others and ', as ' + others}")
        return path
    inner = path / "checkpoints"
    found = _newest(inner if inner.is_dir() else path)
    if found is None:
        got = f"{path} is a file" if path.is_file() else f"expected {inner}/step_NNNNNNNN"
        todo = "name a run or one of its steps; other projects' weights go as hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE"
        raise CheckpointError(f"{path}: no checkpoint found, {got}; {todo}")
    return found


def load(step_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(state, host tensors by name) of a checkpoint that verifies; the tensors are finite and mapped from the
    file, or joined in memory from those of several ranks."""
    state = _read_json(step_dir / STATE)
    if state.get("format") != FORMAT:
        wrong = f"{step_dir / STATE}: format {state.get('format')!r}, expected {FORMAT}"
        raise CheckpointError(f"{wrong}; use the version of gpt2_triton that wrote it")
    shares = state.pop("shares", None)
    parts = [_read_tensors(step_dir / tensors_name(rank)) for rank in range(len(shares) if shares else 1)]
    if shares and tile(shares) is None:
        raise CheckpointError(f"{step_dir / STATE}: its shares do not cover the parameters; choose another step")
    return state, join(parts, shares) if shares else parts[0]


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not safetensors ({error}); choose another step") from error
    if number := first_non_finite(tensors):
        raise CheckpointError(f"{path}: {number}; remove this step and use an older one")
    return tensors
