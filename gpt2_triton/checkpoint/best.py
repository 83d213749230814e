"""The checkpoint of the lowest validation loss: a run's state["best"] is [step, loss], or None."""

import math
from typing import Any


def enter(state: dict[str, Any], step: int, loss: float) -> bool:
    """Whether this validation loss is the lowest after any step so far; `state` then has it."""
    lowest = step > 0 and loss < (state["best"][1] if state["best"] else math.inf)  # and so a number
    if lowest:
        state["best"] = [step, loss]
    return lowest


def step_of(state: dict[str, Any]) -> int | None:
    """Its step; None if the run keeps none, or had no validation yet."""
    return state["best"][0] if state.get("best") else None


def go_back(state: dict[str, Any], target: int) -> None:
    """The run has gone back to step `target`, and has no later checkpoint."""
    if (step_of(state) or 0) > target:
        state["best"] = None
