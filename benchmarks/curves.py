"""Trains bf16 with stochastic rounding, bf16 with fp32 masters, and PyTorch under autocast, and compares their losses.

    python -m benchmarks.curves --tokens train_000000.bin --out curves                             # 500 steps of each
    python -m benchmarks.curves --tokens train_000000.bin --out heart --minutes 10 --batch 64      # memorises the text

GPT-2 124M from the same weights on the same tokens at an ordinary learning rate.  There, runs that differ in the last
bit drift apart; compared is the mean training loss of the last 20 steps: ours must be within 1% of PyTorch's.

With --minutes, stochastic rounding trains for that long, without the time to compile kernels, and PyTorch takes as many
steps on the same batches, however long that takes.  The model memorises a small text: the loss ends near 0, where it is
noise, and before that a lag of a few steps is a large fraction of the loss.  So steps are compared instead: those after
which the mean loss of 20 steps is first below 1.0, and below 0.1, must be within 5% of PyTorch's.  A run that never
gets below 0.1 counts as if the step after its last did; a run that never gets below 1.0 fails.

Tokens per second are those of plain PyTorch, compiled only with --minutes, and the compilation is included; `python -m
benchmarks steps` measures PyTorch at its best.
Writes curves.json and curves.png; exits with 1 if a bound is exceeded.
"""

import argparse
import gc
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.agreement import History, initialised, train_ours, train_torch
from benchmarks.options import NO_GPU
from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.kernels.tuning import INTERPRET

LAST, BOUND = 20, 0.01
LEVELS, LAG = (1.0, 0.1), 0.05
PYTORCH = "PyTorch, autocast"
ENDLESS = 10**9  # steps: more than the minutes allow


def config_of(tokens: Path, steps: int, batch: int, master: str) -> Config:
    return Config.model_validate(
        dict(
            data=dict(train=str(tokens), val=str(tokens), tokenizer="gpt2"),
            train=dict(steps=steps, batch_size=batch, dtype="bf16"),
            optim=dict(lr=3e-4, warmup=100, schedule="constant", master=master),
            eval=dict(every=0),
        )
    )


def _free() -> None:
    """Free the arena of the last run."""
    gc.collect()
    torch.cuda.empty_cache()


def train_for_steps(tokens: Path, steps: int, batch: int) -> tuple[dict[str, History], Config]:
    """Return the three runs, and the configuration of our last one, from whose weights PyTorch starts."""
    runs = {}
    for master in ("none", "fp32"):
        config = config_of(tokens, steps, batch, master)
        runs[f"bf16, master: {master}"], initial, dims = train_ours(config)
        _free()
    runs[PYTORCH] = train_torch(config, initial, dims, autocast=True)
    return runs, config


def train_for_minutes(tokens: Path, minutes: float, batch: int) -> tuple[dict[str, History], Config]:
    """Train with stochastic rounding for `minutes` and PyTorch for as many steps.

    Return the runs and the configuration with the number of steps.  PyTorch starts from the weights before they are
    rounded to bf16, since autocast would lag from rounded ones (agreement.py).  The learning rate is constant, so that
    it does not depend on the number of steps.
    """
    config = config_of(tokens, ENDLESS, batch, "none")
    model, initial = initialised(config_of(tokens, ENDLESS, batch, "fp32"))
    dims = model.dims
    del model
    _free()
    ours, _, _ = train_ours(config, minutes)
    _free()
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": len(ours.losses)})})
    compiled = torch.cuda.is_available()  # a CPU would compile for longer than it trains
    return {"bf16, master: none": ours, PYTORCH: train_torch(config, initial, dims, True, compiled)}, config


def first_below(losses: Sequence[float], level: float) -> int | None:
    """Return the steps after which the mean loss of the last 20 is first below the level; None if it never is."""
    sums = np.cumsum([0.0, *losses])
    below = np.flatnonzero(sums[LAST:] - sums[:-LAST] < LAST * level)
    return LAST + int(below[0]) if len(below) else None


def largest_lag(runs: dict[str, History]) -> float:
    """Return the largest relative difference of the steps to a level between our run and PyTorch's.

    It is infinite if one of them did not get below the first level.
    """
    steps = {name: [first_below(run.losses, level) for level in LEVELS] for name, run in runs.items()}
    if any(reached[0] is None for reached in steps.values()):
        return math.inf
    counted = {name: [n or len(runs[name].losses) + 1 for n in reached] for name, reached in steps.items()}
    theirs = counted.pop(PYTORCH)
    return max(abs(a / b - 1) for ours in counted.values() for a, b in zip(ours, theirs, strict=True))


def means(losses: Sequence[float]) -> np.ndarray:
    """Return the mean loss of the last 20 steps after each step, or of all steps before the 20th."""
    sums, steps = np.cumsum([0.0, *losses]), np.arange(1, len(losses) + 1)
    first = np.maximum(steps - LAST, 0)
    return (sums[steps] - sums[first]) / (steps - first)


def plot(runs: dict[str, History], out: Path, scale: str) -> None:
    """Draw the losses, and below them the difference of ours from PyTorch's, which is too small to be seen in them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    theirs, colors = means(runs[PYTORCH].losses), ("#0072B2", "#D55E00")
    upper.plot(range(1, len(theirs) + 1), theirs, label=PYTORCH, color="#E69F00", lw=4, alpha=0.6)
    ours = [name for name in runs if name != PYTORCH]
    for name, color, dashes in zip(ours, colors, ("-", "--")):
        values = means(runs[name].losses)
        steps, shared = range(1, len(values) + 1), min(len(values), len(theirs))
        upper.plot(steps, values, dashes, label=name, color=color, lw=1.2)
        percent = 100 * (values[:shared] / theirs[:shared] - 1)
        lower.plot(steps[:shared], percent, dashes, label=name, color=color, lw=1.2)
    lower.axhline(0, color="#E69F00", lw=1.5, label=PYTORCH)
    upper.set(title=f"GPT-2 124M, tinyshakespeare: training loss, mean of {LAST} steps", yscale=scale)
    lower.set(title="difference from PyTorch, %", xlabel="step")
    for axes in (upper, lower):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def describe(run: History, config: Config) -> str:
    rate = len(run.losses) * config.total_batch_tokens / run.seconds
    steps = [f"below {level} after {first_below(run.losses, level) or 'none'}" for level in LEVELS]
    final = f"mean loss of the last {LAST} {np.mean(run.losses[-LAST:]):.4f}"
    return f"{len(run.losses)} steps in {run.seconds:.0f} s, {rate:,.0f} tokens/s; {', '.join(steps)}; {final}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True, help="a shard of GPT-2 tokens, made by `prepare text`")
    until = parser.add_mutually_exclusive_group()
    until.add_argument("--steps", type=int, default=500)
    until.add_argument("--minutes", type=float, help="train for this long instead, and PyTorch for as many steps")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step; many memorise the text")
    parser.add_argument("--out", type=Path, required=True, help="directory for curves.json and curves.png")
    a = parser.parse_args()
    if a.minutes is not None and a.minutes <= 0:
        parser.error("--minutes must be above 0")
    if not (device.present() or INTERPRET):
        parser.exit(2, f"error: curves: {NO_GPU}\n")
    if a.minutes:
        runs, config = train_for_minutes(a.tokens, a.minutes, a.batch)
    else:
        runs, config = train_for_steps(a.tokens, a.steps, a.batch)
    final = {name: float(np.mean(run.losses[-LAST:])) for name, run in runs.items()}
    for name, run in runs.items():
        ratio = "" if a.minutes else f" ({final[name] / final[PYTORCH] - 1:+.2%})"
        print(f"{name:<20}{describe(run, config)}{ratio}")
    if a.minutes:
        what, off, bound = f"steps to losses of {LEVELS}", largest_lag(runs), LAG
    else:
        what, off, bound = "final mean losses", max(abs(loss / final[PYTORCH] - 1) for loss in final.values()), BOUND
    found = f"differ by {off:.1%}, bound {bound:.0%}" if off < math.inf else "are not known: train for more minutes"
    print(f"{'agreed' if off <= bound else 'DISAGREED'}: {what} {found}")
    a.out.mkdir(parents=True, exist_ok=True)
    record = dict(config=config.to_dict(), device=torch.cuda.get_device_name(), final=final)
    record["losses"] = {name: run.losses for name, run in runs.items()}
    record["seconds"] = {name: run.seconds for name, run in runs.items()}
    (a.out / "curves.json").write_text(json.dumps(record))
    plot(runs, a.out / "curves.png", "log" if a.minutes else "linear")
    return 0 if off <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
