"""The start of a run: what is refused before torch is imported, and the run's directory."""

import contextlib
import itertools
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from gpt2_triton.checkpoint.format import enclosing_checkpoint, enclosing_run, is_run, list_steps
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import print_line
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import run_dir_error

# Steps of 65,536 tokens at up to 9e-4 trained well here, AdamW and Muon; https://github.com/karpathy/nanoGPT/issues/411
# reports a loss of 7.5 in steps of 3 sequences.  Smaller models learn from smaller steps.
FEW_TOKENS, HIGH_LR, GPT2_PARAMS = 50_000, 6e-4, 100e6
INTERPRETED = 4e8  # parameters x tokens a second in Triton's interpreter: the quickstart on a core of an AMD EPYC
SLOW_MINUTES = 10
# AdamW at 1.5e-3 and 2.4e-3 ended 0.4 and 0.8 above 0.9e-3 in steps of 131,072 (docs/engineering/muon.md).
FEW_FOR_ADAMW, HIGH_FOR_ADAMW = 131_072, 1.5e-3
RECIPE_TOKENS = 524_288


@contextlib.contextmanager
def starting(
    config: Config, run_dir: Path | None, resume: bool | Literal["must"], name: str = ""
) -> Iterator[Path | None]:
    """Check the configuration, and on rank 0 the data's tokenizer and the run's directory; yield the latter, which is
    made, by default as runs/<name>-<time>.  Other ranks do nothing with `run_dir`.
    """
    from gpt2_triton.data.shards import require_tokenizer

    rank, ranks = rank_and_size()
    shape = StepShape.of(config, ranks)  # refuses another parallel.gpus before the run has a directory
    if config.train.precision == "fp8":
        from gpt2_triton.device import require_own_fp8

        require_own_fp8()
    if rank:
        yield run_dir
        return
    check_run_dir(run_dir, resume)
    for split in (config.data.train, config.data.val):
        require_tokenizer(split, config.data.tokenizer)
    warn_of_few_tokens(config, shape)
    warn_of_slow_steps(config)
    with creating_run_dir(name, run_dir) as path:
        yield path


def warn_of_few_tokens(config: Config, shape: StepShape) -> None:
    """Print a warning if a model of GPT-2's sizes takes steps of few tokens at the learning rate of its recipes."""
    tokens, lr = config.total_batch_tokens, config.optim.lr
    few = tokens < FEW_TOKENS and lr >= HIGH_LR
    few |= config.optim.name == "adamw" and tokens <= FEW_FOR_ADAMW and lr >= HIGH_FOR_ADAMW
    if few and config.n_params >= GPT2_PARAMS:
        at_once = shape.gpus * shape.micro_batch * config.train.seq_len
        what = f"{tokens:,} tokens a step are few for optim.lr {lr:g}: the loss may stay high"
        todo = f"in a new run set train.total_batch_tokens to {RECIPE_TOKENS // at_once * at_once}, or lower optim.lr"
        print_line(f"warning: {what}; {todo}", error=True)


def warn_of_slow_steps(config: Config) -> None:
    """Print a warning if a step takes many minutes because there is no GPU."""
    from gpt2_triton import device

    minutes = config.total_batch_tokens * config.n_params / INTERPRETED / 60
    if not device.present() and minutes > SLOW_MINUTES:
        time_of_a_step = f"{minutes / 60:,.0f} hours" if minutes >= 90 else f"{minutes:.0f} minutes"
        what = f"no GPU found: in Triton's interpreter a step takes about {time_of_a_step}"
        todo = "look for the GPU's driver and a torch for it, or choose a smaller model"
        print_line(f"warning: {what}; {todo}", error=True)


def check_run_dir(run_dir: Path | None, resume: bool | Literal["must"]) -> None:
    """Raise ConfigError for a path that cannot be a run directory, and for one with checkpoints unless `resume`."""
    if run_dir is None:
        if resume:
            raise ConfigError("--resume: needs --run_dir, the directory of the run to continue")
        return
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run_dir: {run_dir} is a file; expected a directory or a new name")
    if run := enclosing_run(run_dir):
        raise ConfigError(f"--run_dir: {run_dir} is for checkpoints of the run {run}; give that, or choose another")
    if run_dir.name == "best" and is_run(run_dir.parent):
        weights = f"begin a new run with --init_from {shlex.quote(f'checkpoint:{run_dir}')}"
        raise ConfigError(f"--run_dir: {run_dir} is the best checkpoint of a run; give {run_dir.parent}, or {weights}")
    if checkpoint := enclosing_checkpoint(run_dir):
        which = "is a checkpoint" if run_dir.resolve() == checkpoint else f"lies in the checkpoint {checkpoint}"
        raise ConfigError(f"--run_dir: {run_dir} {which}, not a run; give the directory of a run, or choose another")
    found = list_steps(run_dir / "checkpoints")
    if found and not resume:
        raise ConfigError(
            f"--run_dir: {run_dir} has checkpoints up to {found[-1][1].name}; add --resume, or choose another"
        )


@contextlib.contextmanager
def creating_run_dir(name: str, run_dir: Path | None) -> Iterator[Path]:
    """Make the run's directory, by default runs/<name>-<time> or the first of -2, -3, ... that is new; yield it.
    Remove it at the end if it is new and still empty, as after a refused start.
    """
    named = run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([named], (named.with_name(f"{named.name}-{n}") for n in itertools.count(2)))
    try:
        for path in names:
            new = not path.exists()
            with contextlib.suppress(FileExistsError):  # another start in the same second
                path.mkdir(parents=True, exist_ok=run_dir is not None)
                break
    except OSError as error:
        raise run_dir_error(named, error) from error
    try:
        yield path
    finally:
        if new:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
