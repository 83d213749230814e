"""The last lines of a run on the console: where its checkpoint is, and the commands that come next."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from gpt2_triton.checkpoint.format import step_path
from gpt2_triton.config.config import Config
from gpt2_triton.console import command_line
from gpt2_triton.training.preemption import how_to_continue


def after_training(config: Config, run_dir: Path, step: int, best: tuple[int, float] | None) -> list[str]:
    """Return the lines for a run that has done all its steps.  `best` is (step, validation loss); it is not shown if
    checkpoint.best is off now.
    """
    run = weights = shlex.quote(str(run_dir))
    kept = ""
    if best and config.checkpoint.best == "val_loss":
        kept, weights = f"; {run_dir}/best is step {best[0]}, validation loss {best[1]:.4f}", f"{run}/best"
    return [
        f"checkpoint {step_path(run_dir / 'checkpoints', step)}{kept}",
        f"  sample   {command_line('sample')} {weights}",
        f"  plot     {command_line('plot')} {run}",
        f"  resume   the same command with more --train.steps, --run_dir {run} --resume",
    ]


def after_interruption(run_dir: Path, step: int, steps: Iterable[int], why: str = "") -> list[str]:
    """Return the lines for a run that a signal or the time limit has stopped after `step`; it has no checkpoint without
    a step.  `steps` are those of its checkpoints; if it had to rewind, that of `step` was not saved.
    """
    run, saved = shlex.quote(str(run_dir)), max((found for found in steps if found <= step), default=0)
    if saved < step:
        why += f"; step {step} is repeated" if saved + 1 == step else f"; steps {saved + 1} to {step} are repeated"
    if not step:
        return [f"stopped before the first step{why}: nothing is saved"]
    return [
        f"checkpoint {step_path(run_dir / 'checkpoints', saved)}",
        f"  sample   {command_line('sample')} {run}",
        f"stopped after step {step}{why}; {how_to_continue(run_dir)}",
    ]
