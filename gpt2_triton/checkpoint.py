"""Checkpoints that survive any crash: RUN/checkpoints/step_NNNNNNNN/ with one safetensors file a rank, state.json and manifest.json.

A checkpoint is written into a hidden directory beside its place, every file synced, and then put in place by one rename: it is there whole
or not at all.  manifest.json holds the size and sha256 of the other files, so a flipped bit is noticed: safetensors itself
would load it.  Older checkpoints go only after the new one is in place.  Nothing here is ever unpickled, and the names of files come
from the rules below, never from a file's text.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
TENSORS, STATE, MANIFEST = "rank_00000.safetensors", "state.json", "manifest.json"
_STEP = re.compile(r"step_(\d{8,})")
_TEMPORARY = re.compile(r"\.step_\d{8,}\.tmp-(\d+)")

# Keys of the configuration that may differ when a run goes on, by prefix; all others make it another run.
# The data may move: its content is compared by fingerprint.  The batch in tokens may not change, in how many micro-batches may.
FREE = (
    "log.", "eval.", "sample.", "checkpoint.", "memory.", "optim.", "data.train", "data.val",
    "train.steps", "train.batch_size", "train.skip_limit", "init_from",
)  # fmt: skip
FIXED = ("optim.master",)  # what `optim.` does not free


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another run."""


# ---- writing ----


def save(directory: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], keep: int = 0, major: int = 0) -> Path:
    """Write step's checkpoint under `directory`, then drop all but the newest `keep` (0: none) and the multiples of `major`.

    Returns its path; when it is there already and verifies, nothing is written.  OSError or SafetensorError if it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(directory)
    target = directory / f"step_{step:08d}"
    if target.exists() and not verify(target):
        return target
    temporary = directory / f".step_{step:08d}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_file(tensors, temporary / TENSORS)
        (temporary / STATE).write_text(json.dumps({"format": FORMAT} | state, indent=1), encoding="utf-8")
        manifest = {name: _fingerprint(temporary / name) for name in (TENSORS, STATE)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (temporary / TENSORS, temporary / STATE, temporary / MANIFEST, temporary):
            _sync(path)
        if target.exists():  # there, but damaged
            shutil.rmtree(target)
        os.rename(temporary, target)
        _sync(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(directory, keep, major)
    return target


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _remove_abandoned(directory: Path) -> None:
    """Temporary directories whose writer is gone."""
    for path in directory.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _prune(directory: Path, keep: int, major: int) -> None:
    steps = _steps(directory)
    for step, path in steps[:-keep] if keep else []:
        if not (major and step % major == 0):
            shutil.rmtree(path)


class Saver:
    """Writes checkpoints in a thread.  A failure is a warning and the run goes on, unless nobody would come back to it."""

    def __init__(self, directory: Path, keep: int, major: int):
        self._directory, self._keep, self._major = directory, keep, major
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Start writing; host `tensors` must not change until `wait` has returned."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, tensors, state), name="checkpoint")
        self._thread.start()

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        try:
            save(self._directory, step, tensors, state, self._keep, self._major)
        except (OSError, SafetensorError) as error:
            self._error = error

    def wait(self, raise_errors: bool = False) -> None:
        """Until the last submitted checkpoint is written.  If it failed: CheckpointError or, by default, a warning."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            reason = f"{self._directory}: the checkpoint was not written ({error}); older ones are kept; free some space or choose another --run_dir"
            if raise_errors:
                raise CheckpointError(reason) from error
            print(f"warning: {reason}", file=sys.stderr, flush=True)


# ---- reading ----


def verify(step_dir: Path) -> list[str]:
    """What is wrong with a checkpoint, a line a problem; empty if its files are exactly those that were written."""
    try:
        manifest = json.loads((step_dir / MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (manifest[name]["bytes"], manifest[name]["sha256"]) for name in (TENSORS, STATE)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} is missing or unreadable ({type(error).__name__}: {error})"]
    problems = [f"{p.name} does not belong there" for p in sorted(step_dir.iterdir()) if p.name not in (TENSORS, STATE, MANIFEST)]
    problems += [f"{name} does not belong in {MANIFEST}" for name in manifest if name not in expected]
    for name, (size, digest) in expected.items():
        path = step_dir / name
        if path.is_symlink() or not path.is_file():
            problems.append(f"{name} is missing or not a regular file")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size:,} bytes, expected {size:,}")
        elif _fingerprint(path)["sha256"] != digest:
            problems.append(f"{name} has another sha256 than when it was written")
    return problems


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of everything that looks like a checkpoint, oldest first."""
    if not directory.is_dir():
        return []
    return sorted((int(m[1]), path) for path in directory.iterdir() if (m := _STEP.fullmatch(path.name)) and path.is_dir())


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that verifies; a damaged newer one is passed over with a warning.  None if there is none at all."""
    steps = _steps(run_dir / "checkpoints")
    for _, path in reversed(steps):
        problems = verify(path)
        if not problems:
            return path
        print(f"warning: {path} is damaged and passed over: {problems[0]}", file=sys.stderr, flush=True)
    if steps:
        raise CheckpointError(f"{run_dir}: none of its {len(steps)} checkpoints verifies; start afresh in another --run_dir")
    return None


def find(path: Path) -> Path:
    """The checkpoint meant by `path`: a step directory, or a run (or its checkpoints directory), whose newest good one is taken."""
    if _STEP.fullmatch(path.name):
        problems = verify(path) if path.is_dir() else ["there is no such directory"]
        if problems:
            raise CheckpointError(f"{path}: {problems[0]}; choose another step")
        return path
    found = latest(path.parent if path.name == "checkpoints" else path)
    if found is None:
        raise CheckpointError(f"{path}: no checkpoint found, expected {path}/checkpoints/step_NNNNNNNN; name a run or a step directory")
    return found


def load(step_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(state, host tensors by name) of a checkpoint that verifies."""
    state = json.loads((step_dir / STATE).read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{step_dir}: its format is {state.get('format')}, expected {FORMAT}; use the version that wrote it")
    try:
        return state, load_file(step_dir / TENSORS)
    except SafetensorError as error:
        raise CheckpointError(f"{step_dir / TENSORS}: not a safetensors file ({error}); choose another step") from error


def check_tensors(step_dir: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """CheckpointError with a table unless the checkpoint has exactly the expected names, sizes and dtypes."""
    def describe(tensor: Tensor | None) -> str:
        return "absent" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

    names = sorted(tensors.keys() | expected.keys())
    rows = [(name, describe(tensors.get(name)), describe(expected.get(name))) for name in names]
    if any(saved != wanted for _, saved, wanted in rows):
        raise CheckpointError(_table(f"{step_dir} does not fit this model", rows))


def check_config(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """CheckpointError with a table if the run would not be the same run; else the free keys that changed, as (then, now)."""
    then, now = _flatten(saved), _flatten(current)
    changed = {key: (then.get(key), now.get(key)) for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)}
    fatal = [(key, *values) for key, values in changed.items() if key in FIXED or not key.startswith(FREE)]
    if fatal:
        raise CheckpointError(_table("the configuration is not that of the checkpoint; restore these keys or start another run", fatal))
    return changed


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def _table(title: str, rows: list[tuple]) -> str:
    cells = [("", "checkpoint", "now"), *(tuple(str(cell) for cell in row) for row in rows)]
    width = [max(len(row[i]) for row in cells) for i in range(3)]
    return "\n".join([title, *("  ".join(cell.ljust(w) for cell, w in zip(row, width)).rstrip() for row in cells)])
