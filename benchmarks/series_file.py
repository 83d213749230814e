"""The file of a series: its arms and runs."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
OWN = ("minutes", "program", "best_of")  # keys of an arm that are no options, beside seeds


class Run(NamedTuple):
    arm: str
    seed: int
    options: dict[str, Any]
    minutes: float | None = None  # that the file names
    program: str = "gpt2_triton train"
    best_of: str = ""  # then options are the arm's own


class Series(NamedTuple):
    config: str
    runs: list[Run]  # in the order in which they are made: by seed, then by arm
    baseline: str


def read_series(path: Path) -> Series:
    """Read a series; ValueError if a key is unknown or missing."""
    text = yaml.safe_load(path.read_text())
    unknown = text.keys() - {"config", "options", "arms", "baseline", "seeds"}
    missing = {"config", "arms", "seeds"} - text.keys()
    if unknown or missing:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")
    baseline = text.get("baseline", next(iter(text["arms"])))
    if baseline not in text["arms"]:
        raise ValueError(f"{path}: baseline {baseline} is no arm")
    common, runs = text.get("options") or {}, []
    arms = {name: dict(options or {}) for name, options in text["arms"].items()}
    seeds = {name: options.pop("seeds", text["seeds"]) for name, options in arms.items()}
    own = {name: {key: options.pop(key) for key in OWN if key in options} for name, options in arms.items()}
    for seed in range(max(seeds.values())):
        for name, options in arms.items():
            if seed < seeds[name]:
                seeded = {"train.seed": 42 + seed, "data.seed": 42 + seed}
                shared = {} if "best_of" in own[name] else common
                runs.append(Run(name, seed, shared | options | seeded, **own[name]))
    trials = [run.arm for run in runs if not run.best_of]
    for name, keys in own.items():
        if "best_of" in keys and not any(arm.startswith(keys["best_of"]) for arm in trials):
            raise ValueError(f"{path}: {name}: best_of {keys['best_of']} begins the name of no arm")
    return Series(text["config"], runs, baseline)
