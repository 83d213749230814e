"""Check that a checkpoint's tensors, configuration and data match the current run."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt2_triton.config.removed import REMOVED
from gpt2_triton.config.schema import may_change_on_resume
from gpt2_triton.errors import CheckpointError, ConfigError

Change = tuple[Any, Any]  # the value in the checkpoint, the value now
Rows = list[dict[str, Any]]  # of fingerprints of shards, by data.shards
SHOWN = 10  # files in a table
# fatal ones that other versions did not save, and what their runs did
LATER_KEYS = {"data.align": "none", "optim.name": "adamw", "optim.v": "fp32"}
WEIGHT_KEYS = ("data.tokenizer", "train.dtype", "optim.master")


def check_tensors(step_dir: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise CheckpointError with a table of differences unless names, shapes and dtypes are the expected ones."""
    wrong = _changes(_describe(tensors), _describe(expected))
    if wrong:
        raise CheckpointError(_table(f"{step_dir} does not fit this model", with_absent(wrong)))


def _describe(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in tensors.items()}


def config_differences(saved: dict[str, Any], current: dict[str, Any]) -> tuple[dict[str, Change], dict[str, Change]]:
    """Return the (fatal, free) differences between two configurations by dotted key."""
    then = {key: value for key, value in _flatten(saved).items() if key in LATER_KEYS or key not in REMOVED}
    changes = _changes(LATER_KEYS | then, LATER_KEYS | _flatten(current))
    free = {key: changes[key] for key in changes if may_change_on_resume(key)}
    return {key: changes[key] for key in changes if key not in free}, free


def decides_weights(key: str) -> bool:
    """Return whether init_from takes the weights of a run only with an equal value of this dotted key."""
    return key.startswith("model.") or key in WEIGHT_KEYS


def check_config(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Change]:
    """Return the free differences by dotted key; CheckpointError with a table if there are fatal ones."""
    fatal, free = config_differences(saved, current)
    if fatal:
        wrong = "the checkpoint in --run_dir is of another run; restore these keys or choose another --run_dir"
        if not any(map(decides_weights, fatal)):
            wrong += ", there with --init_from checkpoint:RUN to begin with this run's weights"
        raise CheckpointError(_table(wrong, as_in_yaml(fatal)))
    return free


def require_steps(step_dir: Path, done: int, asked: int) -> None:
    """Raise ConfigError if a checkpoint has more steps than are asked for, before a file of the run is written."""
    if done > asked:
        todo = f"give --train.steps above {done:,} to continue the run, or choose another --run_dir"
        raise ConfigError(f"--train.steps: {step_dir} has {done:,} steps, {asked:,} were asked for; {todo}")


def check_data(step_dir: Path, saved: Rows, current: Rows, key: str, given: str, allow: bool) -> dict[str, Change]:
    """Return the files that differ between two lists of fingerprints; CheckpointError with a table unless `allow`.

    `given` is the value of `key`, data.train or data.val.
    """
    if saved == current:
        return {}
    changed = _changes(_describe_files(saved), _describe_files(current))
    changed = changed or {"order": (_names(saved), _names(current))}
    if not allow:
        todo = "restore it, start another run, or accept it with --data.allow_changed true"
        shown = dict(list(changed.items())[:SHOWN])
        more = f"\nand {len(changed) - SHOWN:,} more files" if len(changed) > SHOWN else ""
        title = f"{step_dir}: {key} {given} is other data than before; {todo}"
        raise CheckpointError(_table(title, with_absent(shown)) + more)
    return changed


def as_in_yaml(changes: dict[str, Change]) -> dict[str, Change]:
    """Return changes of keys as they are printed: null, true, false and "" as a configuration has them."""

    def text(value: Any) -> str:
        return json.dumps(value) if value is None or value == "" or isinstance(value, bool) else str(value)

    return {key: (text(then), text(now)) for key, (then, now) in changes.items()}


def with_absent(changes: dict[str, Change]) -> dict[str, Change]:
    """Return changes of files or tensors as they are printed: "absent" for None."""
    return {
        name: ("absent" if then is None else then, "absent" if now is None else now)
        for name, (then, now) in changes.items()
    }


def note_of_times(saved: dict[str, Any], current: dict[str, Any]) -> str:
    """Return a line about files that have another time than in the checkpoint, "" without any.  Both are the parts of
    state.json about equal data: of a large file some blocks are compared, so tokens between them may have changed.
    """
    times = saved.get("data_times", {})
    names = [
        row["name"]
        for key in times.keys() & current["data_times"].keys()
        for row, then, now in zip(current[key], times[key], current["data_times"][key])
        if "blocks" in row and then != now
    ]
    if not names:
        return ""
    files = min(names) + (f" and {len(names) - 1:,} more shards" if len(names) > 1 else "")
    todo = "if it is no copy, check all of it by --data.verify true"
    return f"warning: {files}: another time than in the checkpoint; the blocks compared are the same; {todo}"


def _describe_files(rows: Rows) -> dict[str, Any]:
    """Return size and hash of each file by name; equal names, of several directories, get a number."""
    described: dict[str, Any] = {}
    for row in rows:
        name, n = row["name"], 2
        while name in described:
            name, n = f"{row['name']} ({n})", n + 1
        digest = str(row.get("blocks") or row.get("sha256"))
        described[name] = f"{row['bytes']:,} bytes, {digest[:8]}"
    return described


def _names(rows: Rows) -> str:
    names = [row["name"] for row in rows]
    return " ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def _changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Change]:
    return {k: (then.get(k), now.get(k)) for k in sorted(then.keys() | now.keys()) if then.get(k) != now.get(k)}


def _table(title: str, changes: dict[str, Change]) -> str:
    rows = [("", "checkpoint", "now"), *((key, str(then), str(now)) for key, (then, now) in changes.items())]
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *lines])
