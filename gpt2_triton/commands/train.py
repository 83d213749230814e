"""`train`, also as train.py: train a GPT-2 from a YAML file."""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from gpt2_triton.checkpoint.format import enclosing_run, list_steps
from gpt2_triton.commands.app import call, make_app, require_at_least, select_device
from gpt2_triton.config.config import Config, options
from gpt2_triton.config.load import load_config, suggestion
from gpt2_triton.config.other_projects import counterpart
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import command_line
from gpt2_triton.distributed.launcher_env import rank_and_size, set_env_from_slurm
from gpt2_triton.errors import ConfigError
from gpt2_triton.training.preemption import ShutdownSignals

FLAGS = ("plan", "gpu", "gpus", "print_config", "run_dir", "resume")

NAME = "train.py" if Path(sys.argv[0]).name == "train.py" else command_line("train")
config_app = make_app(NAME, "Train a GPT-2 from a YAML file; every key below can be overridden.")
app = config_app.meta
config_app.group_parameters = Group("Keys of the configuration", sort_key=2)
app.group_parameters = Group("Run", sort_key=1)


@config_app.default
def _list_keys(*, config: Annotated[Config, Parameter(name="*")] = Config()) -> None:  # noqa: B008
    """Let --help list the configuration's keys.  cyclopts does not parse them: a value is checked only together with
    the YAML file's, by load_config.
    """


@app.default
def train(
    config: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    /,
    *keys: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    plan: bool = False,
    gpu: str | None = None,
    gpus: int | None = None,
    print_config: bool = False,
    run_dir: Path | None = None,
    resume: bool | Literal["must"] = False,
) -> int:
    """Train a GPT-2 from a YAML file; every key below can be overridden.

    Parameters
    ----------
    config: Path
        Name of a recipe, for example quickstart (`gpt2-triton configs` lists them), or a YAML file.
    plan: bool
        Print the memory plan and stop; needs neither a GPU nor data.
    gpu: str
        GPU of --plan: a100-40, a100-80, h100-pcie, h100, h200, b200, 4090 or l40s; by default the present one, or h200.
    gpus: int
        Number of GPUs of --plan; by default parallel.gpus, or 1.
    print_config: bool
        Print the whole configuration as YAML and stop.
    run_dir: Path
        Directory of the run; by default runs/<config>-<time>.
    resume: bool | Literal["must"]
        Resume from the newest checkpoint in --run_dir that verifies; if there is none, start a new run, or end with
        exit code 4 for `--resume must`.
    """
    if str(config).startswith("-"):
        raise ConfigError(f"{config}: unexpected{counterpart(str(config))}; the YAML file comes before all keys")
    if gpus is not None:
        require_at_least(gpus=(gpus, 1))
    if (gpu or gpus) and not plan:
        raise ConfigError(f"--gpu{'' if gpu else 's'}: goes with --plan only; a run uses the GPUs it finds")
    overrides = parse_overrides(keys)
    if not (plan or print_config):
        return _start(config, overrides, run_dir, resume)
    settings = load_config(config, overrides, gpus or 1)
    if plan:
        print(_plan(settings, StepShape.of(settings, gpus), gpu))
    else:
        print(settings.to_yaml().rstrip())
    return 0


command = make_app("train", "Train a GPT-2 from a recipe or a YAML file.")
command.help_flags = command.version_flags = ()  # --help goes to `app`, which lists the keys


@command.default
def _train(*words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Run `app`: a meta app that is itself a sub-command would not list the keys."""
    return call(app, words)


def _start(config: Path, overrides: dict[str, str], run_dir: Path | None, resume: bool | Literal["must"]) -> int:
    """Train on this rank; return the exit code.  Rank 0 chooses the run's directory and prints."""
    set_env_from_slurm()
    rank, ranks = rank_and_size()
    signals = ShutdownSignals(ranks)
    signals.run_dir = run_dir
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.leaving_at_once())
        from gpt2_triton.data.shards import require_tokenizer

        settings = load_config(config, overrides, ranks)
        StepShape.of(settings, ranks)  # refuses another parallel.gpus before the run has a directory
        if rank == 0:
            check_run_dir(run_dir, resume)
            for split in (settings.data.train, settings.data.val):
                require_tokenizer(split, settings.data.tokenizer)
            signals.run_dir = run_dir = stack.enter_context(creating_run_dir(config, run_dir))
        else:
            sys.stdout = open(os.devnull, "w")
        select_device()
        from gpt2_triton.training import trainer

        return trainer.train(settings, run_dir, resume, signals)


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
    """Return `--section.key value` and `--section.key=value` as {"section.key": "value"}."""
    known, given, rest = [key for key, _ in options()], {}, iter(words)
    for word in rest:
        if not word.startswith("--"):
            usual = "; options are --section.key value, as in --optim.lr 3e-4"
            raise ConfigError(f"{word}: unexpected{counterpart(word) or usual}")
        key, equals, value = word[2:].partition("=")
        if key not in known:
            near = suggestion(key, [*FLAGS, *known], "--") or "; see --help"
            raise ConfigError(f"--{key}: unknown option{near}")
        if key in given:
            raise ConfigError(f"--{key}: given twice; remove one")
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise ConfigError(f"--{key}: expected a value after it; one that starts with -- goes as --{key}=VALUE")
        given[key] = value
    return given


def check_run_dir(run_dir: Path | None, resume: bool | Literal["must"]) -> None:
    """Raise ConfigError for a --run_dir that no run can have, or with checkpoints unless `resume`."""
    if run_dir is None:
        if resume:
            raise ConfigError("--resume: needs --run_dir, the directory of the run to continue")
        return
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run_dir: {run_dir} is a file; expected a directory or a new name")
    if run := enclosing_run(run_dir):
        raise ConfigError(f"--run_dir: {run_dir} holds checkpoints of the run {run}; give that, or choose another")
    found = list_steps(run_dir / "checkpoints")
    if found and not resume:
        raise ConfigError(
            f"--run_dir: {run_dir} has checkpoints up to {found[-1][1].name}; add --resume, or choose another"
        )


@contextlib.contextmanager
def creating_run_dir(config: Path, run_dir: Path | None) -> Iterator[Path]:
    """Make the run's directory, by default runs/<config>-<time> or the first of -2, -3, ... that is new; yield it.
    Remove it at the end if it is new and still empty, as after a refused start.
    """
    named = run_dir or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([named], (named.with_name(f"{named.name}-{n}") for n in itertools.count(2)))
    try:
        for path in names:
            new = not path.exists()
            with contextlib.suppress(FileExistsError):  # another start in the same second
                path.mkdir(parents=True, exist_ok=run_dir is not None)
                break
    except OSError as error:
        raise ConfigError(f"--run_dir: cannot make {named}: {error.strerror}; choose another") from error
    try:
        yield path
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


def _plan(config: Config, shape: StepShape, gpu: str | None) -> str:
    from gpt2_triton import device

    if gpu is not None and gpu.lower() not in device.GPUS:
        raise ConfigError(f"--gpu: unknown GPU {gpu}; known are {', '.join(device.GPUS)}")
    import gpt2_triton.kernels as kernels
    from gpt2_triton.model.memory_plan import plan_report

    return plan_report(config, kernels, device.memory_bytes(gpu.lower() if gpu else None), shape)
