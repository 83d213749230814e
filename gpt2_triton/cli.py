"""The command line: train.py and `python -m gpt2_triton COMMAND`.

A user's mistake is a line on stderr and an exit code: 2 configuration or command line, 3 data, 4 checkpoint, 5 memory,
6 not finite; 0 is done, 130 and 143 are a run stopped by a signal.  Anything else is our bug and keeps its traceback.
Kernels are imported inside the commands: TRITON_INTERPRET must be set before one is decorated.
"""

import os
import re
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Group, Parameter

from gpt2_triton import __version__
from gpt2_triton.config import Config, ConfigError, options
from gpt2_triton.configfile import load_config, suggestion

# by name, so that no command imports the kernels for the sake of an exception
EXIT_CODES = {"ConfigError": 2, "DataError": 3, "CheckpointError": 4, "OutOfMemory": 5, "NonFinite": 6}
TRAIN_FLAGS = ("plan", "gpu", "print_config", "run_dir", "resume")


def _app(name: str, help: str) -> App:
    plain_names = Parameter(name_transform=lambda name: name.strip("_"), negative=())  # underscores; no --no-flag twins
    return App(name=name, help=help, help_format="plaintext", version=__version__, default_parameter=plain_names)


def main(app: App, argv: list[str]) -> int:
    """Run a command and return its exit code."""
    try:
        app.suppress_keyboard_interrupt = False
        return app(_underscores(argv), exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        error.verbose = False
        return _fail(" ".join(str(error).split()), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        code = next((EXIT_CODES[c.__name__] for c in type(error).__mro__ if c.__name__ in EXIT_CODES), None)
        if code is None:
            raise
        return _fail(str(error), code)


def _fail(message: str, code: int) -> int:
    if code != 2 or os.environ.get("RANK", "0") == "0":  # under torchrun every rank sees the same mistake
        print("\n".join(f"error: {line}" for line in message.splitlines()), file=sys.stderr, flush=True)
    return code


def _underscores(argv: Iterable[str]) -> list[str]:
    """--run-dir is --run_dir."""
    return [re.sub(r"^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in argv]


def choose_device() -> None:
    """With no GPU, have the kernels run in Triton's interpreter, and say so.  Call it before any kernel is imported."""
    # read when torch and numpy load: the interpreter's arrays are small, and a quickstart step took 4.4 s on two
    # threads, 1.5 s on one
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from gpt2_triton import gpus

    if gpus.present():
        return
    if _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        found = f"triton {version('triton')} with numpy {version('numpy')}"
        raise ConfigError(
            f'no GPU, and {found}: the interpreter of triton before 3.7 needs an older numpy; pip install "numpy<2.4"'
        )
    os.environ["TRITON_INTERPRET"] = "1"
    print("no CUDA GPU found: the kernels run in Triton's interpreter on the CPU", flush=True)


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


# ---- train.py ----

config_app = _app("train.py", "Train a GPT-2 from a YAML file; every key below can be overridden.")
train_app = config_app.meta
train_app.group_parameters = Group("Run", sort_key=0)


@config_app.default
def _keys(*, config: Annotated[Config, Parameter(name="*")] = Config()) -> None:  # noqa: B008
    """For --help, which lists the configuration's keys from their types; `train` reads them."""


@train_app.default
def train(
    config: Path,
    /,
    *keys: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    plan: bool = False,
    gpu: str | None = None,
    print_config: bool = False,
    run_dir: Path | None = None,
    resume: bool = False,
) -> int:
    """Train a GPT-2 from a YAML file; every key below can be overridden.

    Parameters
    ----------
    config: Path
        YAML file, for example configs/quickstart.yaml.
    plan: bool
        Print the memory plan and stop; needs neither a GPU nor data.
    gpu: str
        GPU that --plan is for: a100-40, a100-80, h100-pcie, h100, h200, b200, 4090 or l40s;
        default the present one, else h200.
    print_config: bool
        Print the whole configuration as YAML and stop.
    run_dir: Path
        Directory of the run; default runs/<config>-<time>.
    resume: bool
        Go on from the newest checkpoint in --run_dir that verifies; a fresh start when there is none.
    """
    settings = load_config(config, parse_overrides(keys))
    if print_config:
        print(settings.to_yaml(), end="")
        return 0
    if plan:
        print(_plan(settings, gpu))
        return 0
    if gpu:
        raise ConfigError("--gpu: goes with --plan only; a run uses the GPU it finds")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("torchrun: training on several GPUs is not there yet; start train.py by itself")
    directory = choose_run_dir(config, run_dir, resume)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run_dir: cannot make {directory}: {error.strerror}; choose another") from error
    choose_device()
    from gpt2_triton import trainer

    return trainer.train(settings, directory, resume)


def parse_overrides(words: Iterable[str]) -> dict[str, str]:
    """`--section.key value` and `--section.key=value` as {"section.key": "value"}."""
    known, given, rest = [key for key, _ in options()], {}, iter(words)
    for word in rest:
        if not word.startswith("--"):
            raise ConfigError(f"{word}: unexpected; options are --section.key value")
        key, equals, value = word[2:].partition("=")
        if key not in known:
            raise ConfigError(f"--{key}: unknown option{suggestion(key, [*TRAIN_FLAGS, *known], '--')}")
        if key in given:
            raise ConfigError(f"--{key}: given twice; remove one")
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise ConfigError(f"--{key}: expected a value after it; one that starts with -- goes as --{key}=VALUE")
        given[key] = value
    return given


def choose_run_dir(config: Path, run_dir: Path | None, resume: bool) -> Path:
    """The run's directory; one that holds checkpoints is used only to resume."""
    if run_dir is None:
        if resume:
            raise ConfigError("--resume: needs --run_dir, the directory of the run to go on with")
        return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run_dir: {run_dir} is a file; expected a directory or a new name")
    found = sorted((run_dir / "checkpoints").glob("step_*"))
    if found and not resume:
        raise ConfigError(
            f"--run_dir: {run_dir} has checkpoints up to {found[-1].name}; add --resume, or choose another"
        )
    return run_dir


def _plan(config: Config, gpu: str | None) -> str:
    from gpt2_triton import gpus

    if gpu is not None and gpu.lower() not in gpus.GPUS:
        raise ConfigError(f"--gpu: unknown GPU {gpu}; known are {', '.join(gpus.GPUS)}")
    import gpt2_triton.kernels as kernels
    from gpt2_triton.planning import plan_report

    return plan_report(config, kernels, gpus.memory_bytes(gpu.lower() if gpu else None))


# ---- python -m gpt2_triton ----

tools_app = _app("gpt2_triton", "Data, samples, plots and checks; training is train.py.")
prepare_app = _app("prepare", "Make token shards for training.")
tools_app.command(prepare_app)
Tokenizer = Literal["gpt2", "bytes"]


@prepare_app.command(name="text")
def prepare_text(
    *inputs: Path,
    out: Path = Path("data/text"),
    tokenizer: Tokenizer = "gpt2",
    val_fraction: float = 0.1,
    workers: int | None = None,
) -> None:
    """Tokenise UTF-8 text: .txt, one document a file, and .jsonl, one a line in its field "text"; each also as .gz.

    Parameters
    ----------
    inputs: Path
        Files, folders, which are searched for such files, and quoted globs.
    out: Path
        Directory of the shards, train_*.bin and val_*.bin.
    tokenizer: str
        Tokenizer; data.tokenizer of the configuration must say the same.
    val_fraction: float
        Last part of the text that becomes validation data.
    workers: int
        Processes that tokenise; by default one a CPU.
    """
    if not inputs:
        raise ConfigError("prepare text: expected one or more text files")
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers: must be at least 1, got {workers}")
    from gpt2_triton.data import prepare

    prepare.prepare_text(inputs, out, tokenizer, val_fraction, workers or os.cpu_count() or 1)


@prepare_app.command(name="builtin")
def prepare_builtin(*, out: Path = Path("data/builtin"), tokenizer: Tokenizer = "bytes") -> None:
    """Tokenise the text that every Python ships, the help topics of its reference manual.

    Parameters
    ----------
    out: Path
        Directory of the shards, train_*.bin and val_*.bin.
    tokenizer: str
        Tokenizer; data.tokenizer of the configuration must say the same.
    """
    from gpt2_triton.data import prepare

    prepare.prepare_builtin(out, tokenizer)


@tools_app.command
def sample(
    checkpoint: Path,
    /,
    *,
    prompt: str = "",
    tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 42,
    num: int = 1,
) -> None:
    """Print texts that a model writes.

    Parameters
    ----------
    checkpoint: Path
        A run, or one of its step directories.
    prompt: str
        Text to continue; empty starts at the end-of-text token.
    tokens: int
        Tokens of each text.
    temperature: float
        Softmax temperature of the draw; 0 takes the most likely token.
    top_k: int
        Draw among the k most likely tokens; 0 among all.
    seed: int
        Seed of the first text; the next ones count on.
    num: int
        Texts to write.
    """
    limits = (
        ("tokens", tokens, 1),
        ("temperature", temperature, 0),
        ("top_k", top_k, 0),
        ("seed", seed, 0),
        ("num", num, 1),
    )
    wrong = [f"--{name}: must be at least {least}, got {value}" for name, value, least in limits if not value >= least]
    if wrong:
        raise ConfigError("\n".join(wrong))
    choose_device()
    from gpt2_triton import sample as sampling

    sampling.sample_text(checkpoint, prompt, tokens, temperature, top_k, seed, num)


@tools_app.command
def plot(*runs: Path, out: Annotated[Path, Parameter(name=("out", "-o"))] = Path("loss.png")) -> None:
    """Draw the losses of runs into one PNG.

    Parameters
    ----------
    runs: Path
        Run directories.
    out: Path
        The picture.
    """
    if not runs:
        raise ConfigError("plot: expected one or more run directories")
    from gpt2_triton import plot as plotting

    plotting.plot(runs, out)
    print(f"wrote {out}")


@tools_app.command
def verify() -> int:
    """Compare every kernel with float64 and with PyTorch's own operation on this machine, in one table."""
    choose_device()
    if find_spec("benchmarks") is None:
        raise ConfigError("verify: benchmarks/ is not here; run it in the root of a checkout")
    from benchmarks import verify as comparison

    return comparison.verify()


@tools_app.command
def bench(
    *,
    sizes: str = "d12,d24,d36,d48",
    batch: int | None = None,
    steps: int = 30,
    recompute: Literal["none", "gelu", "gelu+ln", "gelu+ln+qkv", "block"] | None = None,
    baseline: Literal["torch", "none"] = "torch",
    ops: bool = False,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Time GPT-2's training steps beside PyTorch's on this GPU; or, with --ops, each operation beside its floor.

    Parameters
    ----------
    sizes: str
        Comma-separated among d12 (124M), d24 (350M), d36 (774M) and d48 (1558M).
    batch: int
        Sequences a step; by default 64, 64, 32 and 16.
    steps: int
        Steps of each run, at least 6; the first five are not counted.  --ops takes 5 after 5.
    recompute: str
        memory.recompute of our runs; by default gelu for d12, gelu+ln for the others.
    baseline: str
        torch runs PyTorch too, none does not.
    ops: bool
        Time every operation of one step, and print how near its floor it is.
    json: Path
        File for the figures of the runs.
    plot: Path
        With --ops and one size: a PNG of each operation's time beside its floor.
    """
    from gpt2_triton import gpus

    wanted = sizes.split(",")
    unknown = [size for size in wanted if size not in ("d12", "d24", "d36", "d48")]
    if unknown:
        raise ConfigError(f"--sizes: unknown {unknown[0]}; known are d12, d24, d36, d48")
    if steps < 6:
        raise ConfigError(f"--steps: must be at least 6, got {steps}")
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch: must be at least 1, got {batch}")
    if plot and (not ops or len(wanted) > 1):
        raise ConfigError("--plot: goes with --ops and one size, as in --ops --sizes d12 --plot ops.png")
    if json and ops:
        raise ConfigError("--json: does not go with --ops")
    _require_directory("json", json)
    _require_directory("plot", plot)
    if not gpus.present():
        raise ConfigError("bench: needs a CUDA GPU, found none")
    if find_spec("benchmarks") is None:
        raise ConfigError("bench: benchmarks/ is not here; run it in the root of a checkout")
    if ops:
        from benchmarks import ops as operations

        for size in wanted:
            operations.report(size, batch, recompute, plot)
        return 0
    from benchmarks import bench as steps_of_sizes

    return steps_of_sizes.bench(wanted, batch, steps, recompute, baseline == "torch", json)


def _require_directory(option: str, file: Path | None) -> None:
    if file and not file.parent.is_dir():
        raise ConfigError(f"--{option}: {file.parent} is not a directory; make it, or choose another")
