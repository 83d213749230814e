"""The file of a series: its arms and runs, and the check of their options."""

import importlib.util
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.config.load import read_yaml
from gpt2_triton.errors import ConfigError

ROOT = Path(__file__).parents[1]
PROGRAM = "gpt2_triton train"
REQUIRED, OPTIONAL = ("config", "arms", "seeds"), ("options", "baseline")
MOST_SEEDS = 1000  # each is an entry of the list of runs
OPTIONS = "options and their values, but train.seed and data.seed, which follow from `seeds`"
OWN = ("minutes", "program", "best_of", "against")  # keys of an arm that are no options, beside seeds

Require = Callable[[bool, str, Any, str], None]  # (holds, key, got, expected)


class Run(NamedTuple):
    arm: str
    seed: int
    options: dict[str, Any]
    minutes: float | None = None  # that the file names
    program: str = PROGRAM
    best_of: str = ""  # then options are the arm's own
    against: str = ""  # the arm of its pairs; empty: the baseline


class Series(NamedTuple):
    config: str
    runs: list[Run]  # in the order in which they are made: by seed, then by arm
    baseline: str
    file: Path = Path()

    def compared_with(self, arm: str) -> str:
        """Return the arm whose runs an arm's are paired with; empty for the baseline itself."""
        named = next((run.against for run in self.runs if run.arm == arm), "")
        return named or (self.baseline if arm != self.baseline else "")

    def trials(self, run: Run) -> list[Run]:
        """Return the first runs of the arms among which `run`, of an arm with best_of, takes the best."""
        return [r for r in self.runs if not r.best_of and r.seed == 0 and r.arm.startswith(run.best_of)]


def seed_options(seed: int) -> dict[str, int]:
    """Return the options of a seed, whatever the arm."""
    return {"train.seed": 42 + seed, "data.seed": 42 + seed}


def with_trial(run: Run, trial: Run) -> Run:
    """Return a run of an arm with best_of with all its options, if `trial` is the best."""
    return run._replace(options=trial.options | run.options, program=trial.program)


def read_series(path: Path) -> Series:
    """Read a series; ConfigError if it is none."""
    tree, lines = read_yaml(path, "keys such as `config:` and `arms:`")

    def require(holds: bool, key: str, got: Any, expected: str) -> None:
        if not holds:
            at = key if key in lines else key.rpartition(".")[0]
            place = f"{path}:{lines[at]}" if at in lines else str(path)
            raise ConfigError(f"{place}: {key}: got {reprlib.repr(got)}, expected {expected}")

    unknown = sorted(str(key) for key in tree if key not in (*REQUIRED, *OPTIONAL))
    missing = [key for key in REQUIRED if key not in tree]
    if unknown or missing:
        known = f"a series has {', '.join(REQUIRED)}, and may have {' and '.join(OPTIONAL)}"
        raise ConfigError(f"{path}: unknown keys {unknown}, missing keys {missing}; {known}")
    common, named = tree.get("options") or {}, tree["arms"]
    require(isinstance(tree["config"], str), "config", tree["config"], "the path of a configuration")
    require(_is_options(common), "options", common, OPTIONS)
    require(isinstance(named, dict) and bool(named), "arms", named, "names and the options of each")
    for name, options in named.items():
        require(isinstance(name, str), "arms", name, "a name in quotes")
        require(options is None or _is_options(options), f"arms.{name}", options, OPTIONS)
    baseline = tree.get("baseline", next(iter(named)))
    require(baseline in [*named], "baseline", baseline, f"an arm: {', '.join(named)}")

    arms = {name: dict(options or {}) for name, options in named.items()}
    seeds = {name: options.pop("seeds", tree["seeds"]) for name, options in arms.items()}
    own = {name: {key: options.pop(key) for key in OWN if key in options} for name, options in arms.items()}
    for name, number in {"": tree["seeds"], **seeds}.items():
        is_number = _is_number(number, int) and number <= MOST_SEEDS
        at = f"arms.{name}.seeds" if name else "seeds"
        require(is_number, at, number, f"a number of at least 1, at most {MOST_SEEDS}")
    trials = [name for name in arms if "best_of" not in own[name]]
    for name, keys in own.items():
        _check_own_keys(name, keys, [*arms], trials, require)
    runs = [
        Run(name, seed, ({} if "best_of" in own[name] else common) | options | seed_options(seed), **own[name])
        for seed in range(max(seeds.values()))
        for name, options in arms.items()
        if seed < seeds[name]
    ]
    return Series(tree["config"], runs, baseline, path)


def _check_own_keys(name: str, keys: dict[str, Any], arms: list[str], trials: list[str], require: Require) -> None:
    """Check the keys of an arm that are no options; `trials` are the arms without best_of."""
    if "minutes" in keys:
        is_number = _is_number(keys["minutes"], int | float)
        require(is_number, f"arms.{name}.minutes", keys["minutes"], "minutes above 0")
    if "program" in keys:
        is_program = _is_program(keys["program"])
        require(is_program, f"arms.{name}.program", keys["program"], "a module, and its arguments")
        require("best_of" not in keys, f"arms.{name}.program", keys["program"], "none beside best_of")
    if "against" in keys:
        others = [arm for arm in arms if arm != name]
        expected = f"another arm: {', '.join(others)}"
        require(keys["against"] in others, f"arms.{name}.against", keys["against"], expected)
    if "best_of" in keys:
        best, among = keys["best_of"], ", ".join(trials)
        begins = isinstance(best, str) and any(arm.startswith(best) for arm in trials)
        require(begins, f"arms.{name}.best_of", best, f"the beginning of the name of an arm: {among}")


def _is_options(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and key not in seed_options(0) for key in value)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_program(value: Any) -> bool:
    try:
        return isinstance(value, str) and importlib.util.find_spec(value.split()[0]) is not None
    except (ImportError, ValueError, IndexError):
        return False


def check_options(series: Series) -> None:
    """Raise ConfigError for wrong options of an arm; those of one with best_of are checked with each of its trials."""
    wrong: dict[str, str] = {}  # the first arm with a mistake
    first: dict[str, Run] = {}
    for run in series.runs:
        first.setdefault(run.arm, run)
    for run in first.values():
        for whole in [with_trial(run, trial) for trial in series.trials(run)] if run.best_of else [run]:
            try:
                c = Config.load(ROOT / series.config, {key: str(value) for key, value in whole.options.items()})
                if c.log.every != 1:
                    wrong.setdefault("log.every: a result needs the loss of every step; leave this key out", run.arm)
                if run.best_of and not c.eval.every:
                    wrong.setdefault("eval.every: the best trial is that of the least validation loss; not 0", run.arm)
            except ConfigError as error:
                for line in str(error).splitlines():
                    wrong.setdefault(line, run.arm)
    if wrong:
        raise ConfigError("\n".join(f"{series.file}: arms.{arm}: {line}" for line, arm in wrong.items()))


def choose(series: Series, seeds: str | None, arms: Sequence[str] | None) -> list[Run]:
    """Return the runs of these seeds, a comma-separated list, and arms; None: of all.  ConfigError for a seed or an arm
    that the series does not have.
    """
    last = max(run.seed for run in series.runs)
    names = list(dict.fromkeys(run.arm for run in series.runs))
    words = [str(n) for n in range(last + 1)] if seeds is None else [word.strip() for word in seeds.split(",")]
    if wrong := [word for word in words if not (word.isdecimal() and int(word) <= last)]:
        raise ConfigError(f"--seeds: got {wrong[0]!r}, expected numbers from 0 to {last}, such as 0,{last}")
    if unknown := [arm for arm in arms or [] if arm not in names]:
        raise ConfigError(f"--arm: got {unknown[0]!r}, expected one of {', '.join(map(repr, names))}")
    return [run for run in series.runs if run.seed in map(int, words) and run.arm in (arms or names)]


def gpu_numbers(text: str) -> list[str]:
    """Return the GPUs in a comma-separated list; ConfigError unless they are different numbers."""
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for n, word in enumerate(words) if not word.isdecimal() or word in words[:n]]:
        raise ConfigError(f"--gpus: got {wrong[0]!r} in {text!r}, expected different numbers, such as 0,1")
    return words


def require_gpus(numbers: Sequence[str]) -> None:
    """Raise ConfigError for a GPU that is not found: CUDA would hide all GPUs from its runs.  Without any GPU, 0 is the
    CPU.
    """
    count = device.count()
    if lacking := [number for number in numbers if int(number) >= max(count, 1)]:
        has = f"expected numbers from 0 to {count - 1}, the GPUs found here"
        none = "expected a CUDA GPU, found none; leave --gpus out to train on the CPU"
        raise ConfigError(f"--gpus: got {lacking[0]}, {has if count else none}")
