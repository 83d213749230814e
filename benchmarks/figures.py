"""Figures by their keys: those of the record, and two that are computed.

recipe.NAME.tokens and recipe.NAME.hours are of a recipe's run, on one GPU of pictures.MACHINE.
"""

import functools
import re
from typing import Any

from benchmarks.pictures import MACHINE
from benchmarks.record import ROOT, Record
from gpt2_triton.config.config import Config
from gpt2_triton.config.precision import choose_precision
from gpt2_triton.config.speed import training_hours
from gpt2_triton.device import GPUS

KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")


@functools.cache
def recipes() -> dict[str, Config]:
    return {path.stem: Config.load(str(path)) for path in (ROOT / "configs").glob("*.yaml")}


def flat(record: Record) -> dict[str, Any]:
    """Return every figure by its key SECTION.FIGURE, and the computed figures."""
    found = dict[str, Any]()
    for name, section in record.items():
        found |= {f"{name}.{key}": value for key, value in section.items()}
    for name, config in recipes().items():
        found[f"recipe.{name}.tokens"] = config.train.steps * config.train.step_tokens
        chosen, _ = choose_precision(config, GPUS[MACHINE].architecture)
        hours = training_hours(chosen, record.get(MACHINE, {}))
        if hours is not None:
            found[f"recipe.{name}.hours"] = hours
    return found


def value_of(expression: str, figures: dict[str, Any]) -> Any:
    """Return the value of a key, or of arithmetic on keys; KeyError for an unknown key."""
    if expression in figures:
        return figures[expression]
    numbers = KEY.sub(lambda key: repr(figures[key[0]]), expression)
    if not re.fullmatch(r"[\de.+\-*/() ]+", numbers):
        raise KeyError(expression)
    return eval(numbers, {"__builtins__": {}})
