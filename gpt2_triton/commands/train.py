"""`train`, also as train.py: train a model from a recipe or a YAML file."""

import inspect
import os
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from gpt2_triton.checkpoint.format import STATE, list_steps
from gpt2_triton.commands import own
from gpt2_triton.commands.app import AT_LEAST_1, Special, call, make_app, select_device
from gpt2_triton.commands.prepare import Field, Strict
from gpt2_triton.config.config import Config
from gpt2_triton.config.load import suggestion
from gpt2_triton.config.other_projects import counterpart
from gpt2_triton.config.precision import keep_precision
from gpt2_triton.config.recipes import OWN
from gpt2_triton.config.schema import options
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import command_line, discard_unwritten, print_line
from gpt2_triton.distributed.launcher_env import rank_and_size, set_env_from_slurm
from gpt2_triton.errors import ConfigError, OutOfMemoryError
from gpt2_triton.files import expand, read_json
from gpt2_triton.training.preemption import ShutdownSignals
from gpt2_triton.training.start import Resume, check_run_dir, require_fp8, require_rows, starting

if TYPE_CHECKING:
    from gpt2_triton.commands.plan import Report

NAME = "train.py" if Path(sys.argv[0]).name == "train.py" else command_line("train")
ABOUT = f"""Train a model from a recipe or a YAML file; any key below can be given another value.

{NAME} quickstart
{NAME} own --data my.txt --run_dir runs/mine
{NAME} gpt2_124m --plan --gpu 4090
{NAME} mine.yaml --optim.lr 3e-4 --run_dir runs/a --resume"""
config_app = make_app(NAME, ABOUT)
config_app.usage = f"Usage: {NAME} [OPTIONS] CONFIG"
config_app.group_parameters = Group(
    "Keys of the configuration",
    "A default holds where neither CONFIG nor the command line names the key.",
    sort_key=2,
)
config_app.group_commands = Group("Help", sort_key=3)
app = config_app.meta
app.group_parameters = Group("Run", sort_key=1)


@config_app.default
def _list_keys(*, config: Annotated[Config, Parameter(name="*")] = Config()) -> None:  # noqa: B008
    """Let --help list the keys; pydantic, not cyclopts, checks their values with the YAML file."""


@app.default
def train(
    config: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    /,
    *keys: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    data: Annotated[list[Path], Parameter(consume_multiple=True)] | None = None,
    field: Field = "text",
    special: Special = True,
    strict: Strict = False,
    plan: bool = False,
    buffers: bool = False,
    gpu: str | None = None,
    gpus: Annotated[int | None, AT_LEAST_1] = None,
    print_config: bool = False,
    run_dir: Path | None = None,
    resume: Annotated[Resume, Parameter(show_choices=False, metavar="[must]")] = False,
) -> int:
    """Train a model from a recipe or a YAML file; any key below can be given another value.

    Args:
        config: A recipe, such as quickstart (`gpt2-triton configs` lists them), or a YAML file.
        data: Your own text, for the recipe own: files, folders or quoted globs,
            as `prepare text` takes them.
        plan: Print whether the run fits a GPU, its memory, batches and time, and stop,
            with code 5 if it does not fit.
        buffers: With --plan: also print each buffer.
        gpu: GPU of --plan, such as 4090 (an unknown name lists all) or 24GiB. By default
            this machine's, else an h100.
        gpus: Number of GPUs of --plan; by default parallel.gpus, or 1.
        print_config: Print the value of every key as YAML and stop.
        run_dir: Directory of checkpoints and metrics; by default runs/CONFIG-TIME.
        resume: Continue after the newest intact checkpoint; without one start a new run,
            with `must` end with code 4.
    """
    if str(config).startswith("-"):
        raise ConfigError(
            f"{config}: unexpected{counterpart(str(config))}; the YAML file comes before all keys"
        )
    if (gpu or gpus or buffers) and not plan:
        raise ConfigError(
            "--gpu, --gpus, --buffers: go with --plan only; a run uses the GPUs it finds"
        )
    own.require_data(config, data, run_dir, resume)
    overrides = parse_overrides(keys, "; --resume takes nothing, or must" if resume else "")
    text = own.Text(data, field, special, strict) if data else None
    if not text and (field != "text" or strict or not special):
        raise ConfigError(
            "--field, --no-special, --strict: go with --data and the recipe own; leave them out"
        )
    if not (plan or print_config):
        return _start(config, overrides, run_dir, resume, text)
    if gpu:
        from gpt2_triton import device  # imports torch, which takes seconds

        gpu = device.find_gpu(gpu)
    resumed = run_dir if resume else None
    if text:
        machine = own.machine_of(gpus or 1, gpu)
        chosen = own.settings(text, overrides, machine, resumed, download=False)
        settings = chosen.config
    else:
        settings = _load(config, overrides, gpus or 1, run_dir)
    if not plan:
        print(settings.to_yaml().rstrip())
        _print_sources(settings)
        return 0
    if text:
        chosen.describe()
        chosen.report_left_out()
    else:
        _check_weights(settings)
        _check_rows(settings)
        if resumed:
            settings = _with_precision_of(resumed, settings)
    report = _plan(settings, StepShape.of(settings, gpus), gpu, picked=str(config) == OWN)
    print(report.text(buffers))
    return 0 if report.fits else OutOfMemoryError.exit_code


def _load(config: Path, given: dict[str, str], gpus: int, run_dir: Path | None) -> Config:
    """Return the configuration of a recipe or a file; of `own`, of the run that is resumed."""
    if str(config) == OWN and run_dir:
        return own.without_text(run_dir, given, gpus)
    return Config.load(config, given, gpus)


def _check_weights(config: Config) -> None:
    """Refuse weights of other sizes, if they are here: nothing is downloaded for a plan."""
    if config.init_from == "scratch":
        return
    if not Path(expand(config.init_from.partition(":")[2])).exists():
        print_line(
            f"init_from: {config.init_from} is not here, so the plan is of the model in the "
            "configuration; a run refuses weights of other sizes"
        )
        return
    from gpt2_triton.checkpoint.sources import initial_weights

    initial_weights(config)


def _with_precision_of(run_dir: Path, config: Config) -> Config:
    """Return `config` with the precision that a resume of run_dir takes, which keeps what it has,
    and print it.
    """
    steps = list_steps(run_dir / "checkpoints")
    if not steps:
        return config
    config, notes = keep_precision(config, read_json(steps[-1][1] / STATE)["config"])
    for note in notes:
        print_line(note)
    return config


def _check_rows(config: Config) -> None:
    """Compare the tokens of a tokenizer's file, if it is here, with the model's rows."""
    from gpt2_triton.data import tokenizer_file

    if tokenizer_file.is_there(config.data.tokenizer):
        require_rows(config, config.data.tokenizer)


def _print_sources(config: Config) -> None:
    """Print as comments what the run reads of each source of a mixture; DataError without it."""
    from gpt2_triton.data.mixture import Mixture, sources
    from gpt2_triton.data.shards import open_shards

    found = sources(config.data.train)
    if len(found) == 1:
        return
    V = config.model.vocab_size
    T = config.train.seq_len
    parts = [(source, open_shards(source.pattern, V, T)) for source in found]
    samples = config.train.steps * config.train.step_sequences
    for line in Mixture(parts, T, config.data.seed).describe(samples):
        print(f"# {line}")


command = make_app("train", "Train a model from a recipe or a YAML file.")
command.help_flags = command.version_flags = ()  # --help goes to `app`, which lists the keys


@command.default
def _train(*words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Run `app`.  It is no sub-command itself, because cyclopts would then not list the keys."""
    return call(app, words)


def _start(
    config: Path, given: dict[str, str], run_dir: Path | None, resume: Resume, text: own.Text | None
) -> int:
    """Train on this rank; return the exit code.  Rank 0 chooses the run's directory and prints."""
    set_env_from_slurm()
    rank, ranks = rank_and_size()
    signals = ShutdownSignals(ranks)
    if rank == 0:
        check_run_dir(run_dir, resume)  # before the data is prepared
    else:
        sys.stdout = open(os.devnull, "w")
    if not text:
        settings = _load(config, given, ranks, run_dir)
    select_device()  # before numpy is imported
    if text:
        machine = own.machine_of(ranks)
        chosen = own.settings(text, given, machine, run_dir if resume else None, download=True)
        settings = chosen.config
        chosen.describe()
        chosen.prepare()
        if rank == 0:
            plan = _plan(settings, StepShape.of(settings, ranks), None, picked=True)
            print("\n".join(plan.verdict))
    elif str(config) == OWN:
        print_line(f"own text: {settings.data.train}, as before: its files are not read again")
    with starting(settings, run_dir, resume, config.stem) as run_dir:
        from gpt2_triton.training import trainer

        code = trainer.train(settings, run_dir, resume, signals)
        tuned = str(config) == OWN and settings.init_from.startswith("hf:")
        if tuned and run_dir and (rank, code) == (0, 0):
            own.export(run_dir, settings)
    discard_unwritten()  # a closed console does not change the result of a run
    return code


def parse_overrides(words: Iterable[str], hint: str = "") -> dict[str, str]:
    """Return `--section.key value` and `--section.key=value` as {"section.key":
    "value"}; `hint` ends a refusal.
    """
    known = dict(options())
    flags = [*inspect.signature(train).parameters]
    given = dict[str, str]()
    problems = list[str]()
    rest = deque(words)
    while rest:
        word = rest.popleft()
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            usual = (
                "; options are --section.key value, as in --optim.lr 3e-4; "
                "quote a pattern, as in 'train_*.bin'"
            )
            problems.append(f"{word}: unexpected{counterpart(word) or usual + hint}")
            if not word.startswith("-"):
                break
        elif key not in known:
            problems.append(f"--{key}: unknown option{suggestion(key, flags, '--')}")
        elif key in given:
            problems.append(f"--{key}: given twice; remove one")
        is_alone = not equals and (not rest or rest[0].startswith("--"))
        if is_alone:
            value = "true"
            if key in known and known[key].annotation is not bool:
                problems.append(
                    f"--{key}: expected a value after it; if it starts with --, write --{key}=VALUE"
                )
        elif not equals:
            value = rest.popleft()
        given[key] = value
    if problems:
        raise ConfigError("\n".join(problems))
    return given


def _plan(config: Config, shape: StepShape, gpu: str | None, picked: bool) -> "Report":
    """Return the plan for `gpu`, this machine's GPU, its CPU if keys are `picked`, or an h100."""
    from gpt2_triton import device

    device.require_triton()
    # the run's table of launch parameters
    on_cpu = picked and not gpu and device.select_interpreter()
    import gpt2_triton.kernels as kernels
    from gpt2_triton.commands.plan import Gpu, plan_report

    if on_cpu:
        planned = Gpu("this machine", device.free_and_total_bytes("cpu")[1])
    elif device.present() and not gpu:
        nbytes = device.memory_bytes(None)
        planned = Gpu("this GPU", nbytes, device.architecture(), device.own_key())
    else:
        key = gpu or device.DEFAULT
        name = f"the GPU {key}" if gpu else f"the GPU {key} (--gpu names another)"
        planned = Gpu(name, device.memory_bytes(key), device.gpu_of(key).architecture, key)
    architecture = planned.architecture or device.UNKNOWN
    if config.train.precision == "fp8" and architecture != device.UNKNOWN:
        require_fp8(planned.name, architecture)
    return plan_report(config, kernels, planned, shape)
