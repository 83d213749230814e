"""Removed keys.

A run saves every key, also keys that it did not use.  So a removed key with its
harmless value is dropped silently; with another value it is an unknown key.
"""

from collections.abc import Mapping
from typing import Any

# the value that changed nothing, usually the old default
# A key that a resume could not change is also in EARLIER of checkpoint/resume.py.
REMOVED = {
    "data.verify": False,
    "log.main_log": "none",
    "data.align": "none",
    "eval.tasks": "",
    "eval.tasks_every": 250,
    "eval.tasks_data": "",
    "eval.tasks_limit": 0,
}


def without_removed(sections: Mapping[str, Any], any_value: bool = False) -> dict[str, Any]:
    """Return the sections without removed keys that have their harmless value, or with
    `any_value` all removed keys.
    """
    kept = dict(sections)
    for dotted, harmless in REMOVED.items():
        section, _, key = dotted.partition(".")
        keys = kept.get(section)
        if isinstance(keys, Mapping) and key in keys and (any_value or keys[key] == harmless):
            kept[section] = {name: value for name, value in keys.items() if name != key}
    return kept
