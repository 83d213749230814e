"""Removed keys: each is refused in one line that names its replacement.

A run saves every key, also keys that it did not use.  So a removed key with its
harmless value is dropped silently.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A key of an earlier version."""

    harmless: Any  # the value that changed nothing, usually the old default
    instead: str  # the replacement, or what to do


# A key that a resume could not change is also in EARLIER of checkpoint/resume.py.
REMOVED = {
    "data.verify": Removed(
        False, "a run checks each shard's header and 32 blocks, and every token; take it out"
    ),
    "log.main_log": Removed(
        "none", "metrics.jsonl has the numbers of llm.c's main.log; take it out"
    ),
    "data.align": Removed("none", "it ended 0.07 higher in validation loss; take it out"),
    "eval.tasks": Removed(
        "", "`eval/lm_eval.sh CHECKPOINT OUT TASKS` scores a checkpoint; take it out"
    ),
    "eval.tasks_every": Removed(250, "it went with eval.tasks; take it out"),
    "eval.tasks_data": Removed("", "it went with eval.tasks; take it out"),
    "eval.tasks_limit": Removed(0, "it went with eval.tasks; take it out"),
}


def without_removed(sections: Mapping[str, Any], any_value: bool = False) -> dict[str, Any]:
    """Return the sections without removed keys that have their harmless value, or with
    `any_value` all removed keys.
    """
    kept = dict(sections)
    for dotted, removed in REMOVED.items():
        section, _, key = dotted.partition(".")
        keys = kept.get(section)
        if (
            isinstance(keys, Mapping)
            and key in keys
            and (any_value or keys[key] == removed.harmless)
        ):
            kept[section] = {name: value for name, value in keys.items() if name != key}
    return kept
