"""Times whole steps with AdamW and with Muon in turn, for `python -m benchmarks steps --optim adamw,muon`.

A step has the tokens of the size's recipe.  The optimizers alternate in one process, and each goes first in every
second pair, because the clock drifts by more than their difference.  The device is idle before each step.
"""

import gc
import json
import statistics
from pathlib import Path

import torch

import gpt2_triton.kernels as K
from benchmarks.speed.our_gpt2 import calibrated, packed_batch, run_steps
from benchmarks.speed.sizes import Work
from gpt2_triton.model.gpt2 import GPT2

OPTIMIZERS = "adamw", "muon"
RECIPE_TOKENS = {"d48": 1_048_576}  # a step's; 524,288 with the other sizes


def compare_optimizers(works: list[Work], steps: int, out: Path | None) -> None:
    """Print the median milliseconds of `steps` steps with each optimizer, and write all of them to `out` as JSON."""
    rows = []
    for work in works:
        ms = _times(work, steps)
        gc.collect()  # frees the arenas before the next ones are allocated
        torch.cuda.empty_cache()
        print(f"{work.size} {work.precision} B {work.batch}: {summary(ms)}", flush=True)
        rows.append(work._asdict() | dict(ms=ms))
        if out:
            out.write_text(json.dumps(dict(steps=steps, rows=rows), indent=1) + "\n")


def summary(ms: dict[str, list[float]]) -> str:
    """Return the medians, and the median and the range of the differences of neighbouring steps."""
    adamw, muon = (statistics.median(ms[name]) for name in OPTIMIZERS)
    more = sorted(b - a for a, b in zip(ms["adamw"], ms["muon"], strict=True))
    middle = statistics.median(more)
    difference = f"{middle:+.2f} ms ({middle / adamw:+.2%}), of single pairs {more[0]:+.2f} to {more[-1]:+.2f}"
    return f"AdamW {adamw:.2f} ms, Muon {muon:.2f} ms; Muon {difference}"


def _times(work: Work, steps: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step by optimizer; each one's first step is not counted."""
    models = {name: _model(name, work) for name in OPTIMIZERS}
    packed = packed_batch(work.config())
    for model in models.values():
        calibrated(model, packed)
    ms: dict[str, list[float]] = {name: [] for name in models}
    for number in range(steps + 1):
        for name in OPTIMIZERS[:: -1 if number % 2 else 1]:
            [result] = run_steps(models[name], packed, range(number, number + 1))
            ms[name] += [result.seconds * 1e3] if number else []
    for model in models.values():
        model.release_graphs()
    return ms


def _model(name: str, work: Work) -> GPT2:
    tokens = RECIPE_TOKENS.get(work.size, 524_288)
    config = work.config().replace(train={"total_batch_tokens": tokens}, optim={"name": name})
    model = GPT2(config, K, "cuda")
    model.compile()
    model.initialise(config.train.seed)
    return model
