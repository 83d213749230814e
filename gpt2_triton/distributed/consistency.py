"""Consistency checks across ranks at start-up: the configuration and the data."""

import hashlib
import json
from typing import Any

from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.errors import ConfigError


def require_equal(control: ControlGroup, **values: Any) -> None:
    """Raise ConfigError, naming the ranks, if a JSON value differs from rank 0's value.

    Without this check a node with an older configuration or a missing shard
    would train without an error.
    """
    for what, value in values.items():
        text = json.dumps(value, sort_keys=True)
        found = control.all_gather(hashlib.sha256(text.encode()).hexdigest())
        others = [rank for rank, other in enumerate(found) if other != found[0]]
        if others:
            control.leave()
            raise ConfigError(
                f"{what}: not the same on ranks {others} as on rank 0; "
                "copy the same files to every node"
            )
