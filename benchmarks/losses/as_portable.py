"""Trains with the code of another GPU on a Hopper GPU, and compares the losses
with those of Hopper's portable code.

    python -m benchmarks.losses.as_portable a100|rtx3090|rtx4090
        --data 'SHARDS/{}_*.bin' [--out FILE] [--key value ...]

GPT-2 124M takes 300 steps from the same weights on the same tokens (--data:
{} stands for train and val):

    code        the other GPU's code, with a checkpoint halfway
    resumed     the same from that checkpoint: its last checkpoint must have
                the same bytes
    portable    the portable kernels compiled for Hopper
    hopper      Hopper's own kernels

Rounding differs between code, portable and hopper, and training magnifies a
rounding.  So the differences of the losses are compared with a scatter, the
differences between portable and hopper: over the last 100 steps the root of
their mean square is at most twice the scatter's.  The exit code is 1 if it is
more, or if a byte differs.  The scatter is that of one pair of runs: if a code
misses the bound though its first losses agree, compare more seeds
(--train.seed).
"""

import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from benchmarks import as_gpu
from benchmarks.layout import aligned
from benchmarks.losses import vs_torch
from benchmarks.losses.loss_compare import Result, differences, read_result
from benchmarks.runs import QUIET, Keys
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.files import write_json

app = make_app("python -m benchmarks.losses.as_portable")
app.help_epilogue = __doc__
Older = Literal["a100", "rtx3090", "rtx4090"]  # not the portable code, with which they compare
STEPS = 300
LAST = 100
BOUND = 2.0
KEYS = QUIET | {
    "train.steps": STEPS, "train.batch_size": 32, "train.total_batch_tokens": 32_768,
    "memory.recompute": "none", "optim.warmup": 30, "checkpoint.every": STEPS // 2,
}  # fmt: skip


def train(code: as_gpu.Code | None, run_dir: Path, keys: dict[str, Any], *more: str) -> None:
    """Train with a GPU's code, or with Hopper's own."""
    vs_torch.train([*as_gpu.program(code), "gpt2_triton", "train"], run_dir, keys, *more)


def resumed(code: as_gpu.Code, run_dir: Path, keys: dict[str, Any]) -> Result:
    """Train the second half of a run again, and return its result."""
    copy = run_dir.with_name("resumed")
    shutil.copytree(run_dir, copy)
    shutil.rmtree(max((copy / "checkpoints").glob("step_*")))
    train(code, copy, keys, "--resume")
    return read_result(copy)


def losses(result: Result) -> list[float]:
    return [record["loss"] for record in result.metrics if "loss" in record]


def distance(some: list[float], others: list[float]) -> float:
    """Return the root of the mean square of the differences of the last losses."""
    pairs = list(zip(some, others, strict=True))[-LAST:]
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))


def compare(code: as_gpu.Code, keys: dict[str, Any], work: Path) -> dict[str, Any]:
    """Return the curves of the runs, their distances, and the lines of what
    differs after the resume.
    """
    arms: dict[str, as_gpu.Code | None] = {
        "code": code,
        "portable": "h100-portable",
        "hopper": None,
    }
    results = {}
    for name, each in arms.items():
        train(each, work / name, keys)
        results[name] = read_result(work / name)
        print(f"{name}: last loss {losses(results[name])[-1]:.4f}", flush=True)
    again = resumed(code, work / "code", keys)
    tensors = Result([], results["code"].tensors, again.ms), Result([], again.tensors, again.ms)
    curves = {name: losses(result) for name, result in results.items()}
    found: dict[str, Any] = dict(
        code=as_gpu.title(code), keys=keys, curves=curves, bytes=differences(*tensors)
    )
    found |= dict(distance=distance(curves["code"], curves["portable"]))
    return found | dict(scatter=distance(curves["portable"], curves["hopper"]))


def report(found: dict[str, Any]) -> int:
    """Print the curves and the verdict; return the exit code."""
    title, curves = found["code"], found["curves"]
    steps = [1, *range(25, len(curves["code"]) + 1, 25)]
    rows = [[str(step), *(f"{curve[step - 1]:.5f}" for curve in curves.values())] for step in steps]
    print(aligned([["step", title, "portable", "hopper"], *rows]))
    near = found["distance"] <= BOUND * found["scatter"]
    apart = f"{title} and portable: {found['distance']:.2e} apart"
    scatter = f"portable and hopper {found['scatter']:.2e}"
    verdict = "agreed" if near else "DISAGREED"
    print(f"{apart}, {scatter}: {verdict}, the bound is {BOUND:.0f} times")
    equal = "equal bytes" if not found["bytes"] else "\n".join(["DIFFERENT bytes", *found["bytes"]])
    print(f"after the resume: {equal}")
    return 0 if near and not found["bytes"] else 1


@app.default
def command(code: Older, *keys: Keys, data: str, out: Path | None = None) -> int:
    """Compare the losses of another GPU's code with those of the portable kernels.

    Args:
        code: a100, rtx3090 or rtx4090.
        keys: Keys of a configuration, which all runs get.
        data: Glob of the shards, with {} for train and val.
        out: File for the curves.
    """
    shards = {f"data.{split}": data.format(split) for split in ("train", "val")}
    with tempfile.TemporaryDirectory() as work:
        found = compare(code, KEYS | shards | parse_overrides(keys), Path(work))
    if out:
        write_json(out, found)
    return report(found)


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
