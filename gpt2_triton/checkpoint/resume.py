"""Read the checkpoint from which a run continues, and compare its configuration and
data with the present ones.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gpt2_triton.checkpoint.format import best_step
from gpt2_triton.checkpoint.load import Checkpoint, open_checkpoint
from gpt2_triton.checkpoint.stored import StoredTensor
from gpt2_triton.config.config import Config
from gpt2_triton.config.removed import REMOVED
from gpt2_triton.config.schema import may_change_on_resume, options
from gpt2_triton.data.tokenizer import identity
from gpt2_triton.errors import CheckpointError, ConfigError

Change = tuple[Any, Any]  # the value in the checkpoint, the value now
Rows = list[dict[str, Any]]  # of fingerprints of shards, by data.shards
SHOWN = 10  # files in a table
# kept keys, with the values of runs that did not save them
EARLIER = {"data.align": "none"} | {
    key: field.default
    for key, field in options()
    if not may_change_on_resume(key) and not field.exclude
}


def explicit(config: Config) -> dict[str, Any]:
    """Return the configuration as a save writes it: with a step's tokens and a tokenizer's hash,
    which resumes keep.
    """
    made = {"total_batch_tokens": config.train.step_tokens}
    tokenizer = {"tokenizer": identity(config.data.tokenizer)}
    return config.replace(train=made, data=tokenizer).to_dict()


def read(
    found: Path, config: Config, shards: Mapping[str, Sequence[Any]]
) -> tuple[Checkpoint, list[str]]:
    """Return the open checkpoint, and lines about what has changed.

    `found` verifies.  `shards` has their keys in state.json.  CheckpointError if the checkpoint is
    of another run, ConfigError if it has more steps than train.steps.
    """
    checkpoint = open_checkpoint(found)
    saved = checkpoint.state
    changed = check_config(saved["config"], explicit(config))
    if saved["step"] > config.train.steps:
        raise ConfigError(
            f"train.steps: {found} has {saved['step']:,} steps, {config.train.steps:,} were asked "
            f"for; set it above {saved['step']:,} to continue the run, or choose another --run_dir"
        )
    files = dict[str, Change]()
    notes = [f"resuming after step {saved['step']} from {found}"]
    places = {
        "data": f"data.train {config.data.train}",
        "validation_data": f"data.val {config.data.val}",
    }
    for key, where in places.items():
        if key in saved and key in shards:
            now = _fingerprints(shards[key], saved[key])
            other = check_data(found, saved[key], now, where, config.data.allow_changed)
            files |= other
            best = best_step(saved)
            if key == "validation_data" and best and (other or "eval.tokens" in changed):
                notes.append(
                    f"best: step {best}'s loss is of other validation data, and no longer counts"
                )
                saved["best"] = None
    _, init_from = changed.pop("init_from", (None, "scratch"))
    if init_from != "scratch":
        notes.append(
            f"init_from {config.init_from} is not used: the run continues with its own weights"
        )
    for changes, none in ((changed, "null"), (files, "absent")):
        notes += [
            f"changed: {k} {as_text(v, none)} -> {as_text(now, none)}"
            for k, (v, now) in changes.items()
        ]
    return checkpoint, notes


def _fingerprints(shards: Sequence[Any], saved: Rows) -> Rows:
    """Return the fingerprints of shards, each of the kind that `saved` has in its place."""
    of_ends = {i for i, row in enumerate(saved) if "sha256" in row}
    return [
        shard.fingerprint_of_ends() if i in of_ends else shard.fingerprint
        for i, shard in enumerate(shards)
    ]


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError with a table of differences unless names, shapes
    and dtypes are as expected.
    """

    def forms(of: Mapping[str, Tensor] | Mapping[str, StoredTensor]) -> dict[str, Any]:
        return {
            name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
            for name, t in of.items()
        }

    wrong = _changes(forms(checkpoint.tensors), forms(expected))
    if wrong:
        title = f"{checkpoint.step_dir} does not fit this model"
        raise CheckpointError(_table(title, wrong, "absent"))


def config_differences(
    saved: dict[str, Any], current: dict[str, Any]
) -> tuple[dict[str, Change], dict[str, Change]]:
    """Return the (fatal, free) differences between two configurations by dotted key."""
    then = {
        key: value for key, value in _flatten(saved).items() if key in EARLIER or key not in REMOVED
    }
    changes = _changes(EARLIER | then, EARLIER | _flatten(current))
    free = {key: changes[key] for key in changes if may_change_on_resume(key)}
    return {key: changes[key] for key in changes if key not in free}, free


def decides_weights(key: str) -> bool:
    """Return whether init_from takes weights only from a run with an equal
    value of this dotted key.
    """
    of_model = key.startswith("model.") and key != "model.dropout"
    return of_model or key == "data.tokenizer"


def check_config(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Change]:
    """Return the free differences by dotted key; CheckpointError with a
    table if there are fatal ones.
    """
    fatal, free = config_differences(saved, current)
    if fatal:
        wrong = (
            "the checkpoint in --run_dir is of another run; "
            "restore these keys, as in its config.yaml, or choose another --run_dir"
        )
        if not any(map(decides_weights, fatal)):
            wrong += ", there with init_from checkpoint:RUN to begin with this run's weights"
        raise CheckpointError(_table(wrong, fatal))
    return free


def check_data(
    step_dir: Path, saved: Rows, current: Rows, where: str, allow: bool
) -> dict[str, Change]:
    """Return the files that differ; CheckpointError with a table unless `allow`.
    `where`: the key and its value.
    """
    if saved == current:
        return {}
    changed = _changes(_by_file(saved), _by_file(current)) or {
        "order of the files": ("another", "this")
    }
    if not allow:
        todo = "restore it, start another run, or accept it with data.allow_changed true"
        shown = dict(list(changed.items())[:SHOWN])
        more = f"\nand {len(changed) - SHOWN:,} more files" if len(changed) > SHOWN else ""
        title = f"{step_dir}: {where} is other data than before; {todo}"
        raise CheckpointError(_table(title, shown, "absent") + more)
    return changed


def as_text(value: Any, none: str = "null") -> str:
    """Return a value as in YAML, `none` for None."""
    if value is None:
        return none
    return json.dumps(value) if value == "" or isinstance(value, bool) else str(value)


def _by_file(rows: Rows) -> dict[str, Any]:
    """Return size and hash of each file by name; of a mixture also its source and share."""
    found = {}
    for row in rows:
        name = f"source {row['source']}: {row['name']}" if "source" in row else row["name"]
        share = f", share {row['share']}" if "share" in row else ""
        found[name] = f"{row['bytes']:,} bytes, {(row.get('blocks') or row['sha256'])[:8]}{share}"
    return found


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= _flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def _changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Change]:
    return {
        k: (then.get(k), now.get(k))
        for k in sorted(then.keys() | now.keys())
        if then.get(k) != now.get(k)
    }


def _table(title: str, changes: dict[str, Change], none: str = "null") -> str:
    rows = [("", "checkpoint", "now")]
    rows += [(k, as_text(v, none), as_text(now, none)) for k, (v, now) in changes.items()]
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title, *lines])
