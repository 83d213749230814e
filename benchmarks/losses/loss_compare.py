"""Trains the same runs with two versions of the code and compares the bits of
their results, or their speed.

    python -m benchmarks.losses.loss_compare OLD NEW --cpu
        configs/quickstart.yaml, 20 steps
    python -m benchmarks.losses.loss_compare OLD NEW --gpu
        GPT-2 124M, 5 steps at each recompute level, and fp32
    python -m benchmarks.losses.loss_compare OLD NEW --gpus 2
        on 2 GPUs, at each ZeRO stage
    python -m benchmarks.losses.loss_compare OLD NEW --time 60
        [--size d12] [--batch_size 64]

OLD and NEW are commits of this repository or directories with a checkout.  The
comparison covers all numbers in metrics.jsonl except times, and the sha256 of
each tensor of the last checkpoint: weights, moments, master bits.  --time also
prints the median ms per step.  It trains on --gpus GPUs, in the order old,
new, new, old.  A run's checkpoint is written into $TMPDIR and deleted after
the comparison.  All runs get the keys of a configuration that are given, such
as --train.precision fp8.  The exit code is 1 if a bit differs, 2 if a run
fails.
"""

import hashlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from safetensors import safe_open

from benchmarks.layout import aligned
from benchmarks.record import ROOT
from benchmarks.runs import BUILTIN, QUIET, Keys, finish, words_of
from benchmarks.speed.steps import torchrun
from gpt2_triton import device
from gpt2_triton.commands.app import AT_LEAST_1, main, make_app
from gpt2_triton.console import print_line
from gpt2_triton.errors import ConfigError
from gpt2_triton.training.metrics import METRICS, read_metrics

app = make_app("python -m benchmarks.losses.loss_compare")
app.help_epilogue = __doc__
TIMES = {"ms", "tok_s", "mfu"}  # keys of metrics.jsonl that differ between equal runs
RECIPE = "gpt2_124m"
LEVELS = ("none", "gelu", "gelu+ln", "gelu+ln+qkv", "block")
WARM_STEPS = 10  # steps that are not timed: clocks settle, and CUDA graphs are captured


class Case(NamedTuple):
    """A run of train.py with a recipe of the checkout."""

    name: str
    recipe: str
    keys: dict[str, object]
    gpus: int = 1


class Result(NamedTuple):
    metrics: list[dict[str, Any]]  # without times
    tensors: dict[str, str]  # sha256 by "file: tensor"
    ms: list[float]  # of each step


def gpt2(steps: int, batch_size: int, micro_steps: int = 1, gpus: int = 1) -> dict[str, object]:
    """Return keys of GPT-2 124M on the builtin text, with one checkpoint after the last step."""
    tokens = batch_size * 1024 * micro_steps * gpus
    sizes = {"train.batch_size": batch_size, "train.total_batch_tokens": tokens}
    return BUILTIN | QUIET | sizes | {"train.steps": steps, "optim.warmup": 1}


def cases(cpu: bool, gpu: bool, gpus: int, timed: int, size: str, batch_size: int) -> list[Case]:
    """Return the runs that the options select."""
    found = []
    if timed:
        keys = gpt2(timed, batch_size, gpus=gpus) | {"model.size": size}
        return [Case(f"{size}, batch {batch_size}, GPUs {gpus}", RECIPE, keys, gpus)]
    if cpu:
        keys = {"train.steps": 20, "optim.warmup": 8, "eval.every": 10, "sample.every": 0}
        found.append(Case("quickstart", "quickstart", keys))
    if gpu:
        run = gpt2(5, batch_size)
        halves = gpt2(5, batch_size, 2) | {"optim.master": "fp32"}
        found += [Case(level, RECIPE, run | {"memory.recompute": level}) for level in LEVELS]
        found.append(Case("2 micro-steps, master fp32", RECIPE, halves))
        found.append(Case("fp32", RECIPE, run | {"train.dtype": "fp32"}))
    if gpus > 1:
        run = gpt2(5, batch_size, 2, gpus)
        found += [
            Case(f"{gpus} GPUs, ZeRO-{z}", RECIPE, run | {"parallel.zero": z}, gpus)
            for z in (1, 0, 2)
        ]
    return found


# ---- runs ----


def train(tree: Path, case: Case, more: tuple[str, ...], work: Path) -> Result:
    """Train with further words in a new directory under `work`, which also receives the builtin
    data, and read the result.
    """
    launcher = ["-m", *torchrun(case.gpus)[:-1]] if case.gpus > 1 else []
    config = tree / "configs" / f"{case.recipe}.yaml"
    with tempfile.TemporaryDirectory(prefix="run-", dir=work) as run_dir:
        words = [*words_of(case.keys | {"run_dir": run_dir}), *more]
        finish(*launcher, tree / "train.py", config, *words, folder=work, tree=tree)
        return read_result(Path(run_dir))


def read_result(run_dir: Path) -> Result:
    """Return the metrics of a run directory and the tensors of its last checkpoint."""
    records = read_metrics(run_dir / METRICS)
    metrics = [
        {key: value for key, value in record.items() if key not in TIMES} for record in records
    ]
    last = max((run_dir / "checkpoints").glob("step_*"))
    tensors = {}
    for path in sorted(last.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                digest = hashlib.sha256(f"{part.get_dtype()} {part.get_shape()} ".encode())
                digest.update(file.get_tensor(name).flatten().view(torch.uint8).numpy())
                tensors[f"{path.name}: {name}"] = digest.hexdigest()
    return Result(metrics, tensors, [record["ms"] for record in records if "ms" in record])


# ---- comparison ----


def differences(old: Result, new: Result) -> list[str]:
    """Return one line for the first record of metrics.jsonl that differs, and one for
    each tensor that differs.
    """
    lines = [] if old.ms else ["no step was logged"]
    for then, now in zip(old.metrics, new.metrics):
        if then != now:
            keys = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
            lines.append(
                f"step {then['step']}: "
                + ", ".join(f"{k} {then.get(k)} != {now.get(k)}" for k in keys)
            )
            break
    if len(old.metrics) != len(new.metrics):
        lines.append(f"records in metrics.jsonl: {len(old.metrics)} != {len(new.metrics)}")
    for name in sorted(old.tensors.keys() | new.tensors.keys()):
        then, now = (result.tensors.get(name, "missing") for result in (old, new))
        if then != now:
            lines.append(f"{name}: sha256 {then[:12]} != {now[:12]}")
    return lines


def compare(
    trees: dict[str, Path], case: Case, more: tuple[str, ...], work: Path, order: tuple[str, ...]
) -> dict[str, Any]:
    """Train the case with the trees named in `order`, and return a row of the report."""
    results: dict[str, list[Result]] = {"old": [], "new": []}
    for name in order:
        results[name].append(train(trees[name], case, more, work))
        print_line(f"{case.name}: {name}: last record {results[name][-1].metrics[-1:]}")
    first, *others = results["old"] + results["new"]
    found = [line for other in others for line in differences(first, other)]
    times = {
        name: [ms for run in runs for ms in run.ms[WARM_STEPS:]] for name, runs in results.items()
    }
    ms = {name: statistics.median(times[name]) for name in times} if len(order) > 2 else {}
    return {"case": case.name, "differences": found, "tensors": len(first.tensors)} | ms


def table(rows: list[dict[str, Any]]) -> str:
    """Return one line per case, and below it one per difference."""
    cells = [["case", "bits", "tensors", "old ms", "new ms", "new/old"]]
    for row in rows:
        bits = "DIFFERENT" if row["differences"] else "equal"
        times = ["", "", ""]
        if "old" in row:
            ratio = row["new"] / row["old"]
            times = [f"{row['old']:.2f}", f"{row['new']:.2f}", f"{ratio:.4f}"]
        cells.append([row["case"], bits, str(row["tensors"]), *times])
    head, *lines = aligned(cells, left=(0, 1)).splitlines()
    found = [[line, *row["differences"]] for line, row in zip(lines, rows, strict=True)]
    return "\n".join([head, *("\n    ".join(each) for each in found)])


def checkout(source: str, work: Path, name: str) -> Path:
    """Return the directory `source`, or a new one under `work` with the
    files of the commit `source`.
    """
    if (Path(source) / "train.py").is_file():
        return Path(source).resolve()
    tree, archive = work / name, work / f"{name}.tar"
    done = subprocess.run(
        ["git", "-C", ROOT, "archive", "-o", archive, source], capture_output=True, text=True
    )
    if done.returncode:
        raise ConfigError(
            f"{source}: neither a directory with train.py nor a commit: {done.stderr.strip()}"
        )
    tree.mkdir()
    shutil.unpack_archive(archive, tree, filter="data")
    archive.unlink()
    return tree


@app.default
def versions(
    old: str,
    new: str,
    *keys: Keys,
    cpu: bool = False,
    gpu: bool = False,
    gpus: Annotated[int, AT_LEAST_1] = 1,
    time: int = 0,
    size: str = "d12",
    batch_size: Annotated[int, AT_LEAST_1] = 8,
) -> int:
    """Compare two versions; return 1 if a bit differs.

    Args:
        old: Commit or directory.
        new: Commit or directory.
        keys: Keys of a configuration, which all runs get.
        cpu: Compare configs/quickstart.yaml.
        gpu: Compare GPT-2 124M on one GPU.
        gpus: Compare, or time, on this number of GPUs.
        time: Time runs of this number of steps.
        size: model.size of timed runs.
        batch_size: Sequences of 1024 tokens per GPU and micro-step.
    """
    if not (cpu or gpu or time or gpus > 1):
        raise ConfigError("nothing to compare: expected --cpu, --gpu, --gpus 2 or --time STEPS")
    if 0 < time <= WARM_STEPS:
        raise ConfigError(f"--time {time}: the first {WARM_STEPS} steps are not timed; give more")
    if (gpu or time or gpus > 1) and device.count() < gpus:
        raise ConfigError(f"needs {gpus} CUDA GPUs, found {device.count()}; --cpu needs none")
    # sys.exit raises, so that `train` kills its run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    order = ("old", "new", "new", "old") if time else ("old", "new")
    with tempfile.TemporaryDirectory(prefix="loss_compare-") as directory:
        work = Path(directory)
        trees = {"old": checkout(old, work, "old"), "new": checkout(new, work, "new")}
        rows = [
            compare(trees, case, keys, work, order)
            for case in cases(cpu, gpu, gpus, time, size, batch_size)
        ]
    print_line(table(rows))
    return int(any(row["differences"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
