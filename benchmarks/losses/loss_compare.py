"""Trains the same runs with two versions of the code and compares the bits of
their results, or their speed.

    python -m benchmarks.losses.loss_compare OLD NEW --cpu        configs/quickstart.yaml, 20 steps
    python -m benchmarks.losses.loss_compare OLD NEW --gpu
        GPT-2 124M, 5 steps at each recompute level, and fp32
    python -m benchmarks.losses.loss_compare OLD NEW --gpus 2
        on 2 GPUs: ZeRO stages by peer copies, and NCCL
    python -m benchmarks.losses.loss_compare OLD NEW --time 60 --size d12 --batch_size 64

OLD and NEW are commits of this repository or directories with a checkout.  The comparison covers
all numbers in metrics.jsonl except times, and the sha256 of each tensor of the last checkpoint:
weights, moments, master bits.  --time also prints the median ms per step.  It trains on --gpus
GPUs, in the order old, new, new, old.
A run's checkpoint is written into $TMPDIR and deleted after the comparison.  All runs get the
keys of a configuration that are given, such as --train.precision fp8.  The exit code is 1 if a
bit differs, 2 if a run fails.
"""

import argparse
import hashlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from gpt2_triton import device
from gpt2_triton.console import print_line
from gpt2_triton.training.metrics import METRICS, read_metrics

ROOT = Path(__file__).parents[2]
TIMES = {"ms", "tok_s", "mfu"}  # keys of metrics.jsonl that differ between equal runs
LEVELS = ("none", "gelu", "gelu+ln", "gelu+ln+qkv", "block")
WARM_STEPS = 10  # steps that are not timed: clocks settle, and CUDA graphs are captured
# bytes are valid ids of GPT-2's vocabulary
DATA = "--data.train builtin --data.val builtin --data.tokenizer bytes"
QUIET = (
    "--eval.every 0 --eval.hellaswag_every 0 --sample.every 0 "
    "--checkpoint.every 0 --checkpoint.major 0"
)


class Case(NamedTuple):
    """A run of train.py.  `options` begins with a configuration file, relative to the checkout."""

    name: str
    options: str
    gpus: int = 1
    nodes: int = 1  # torchrun agents on this host; several agents make ranks exchange through NCCL


class Result(NamedTuple):
    metrics: list[dict[str, Any]]  # without times
    tensors: dict[str, str]  # sha256 by "file: tensor"
    ms: list[float]  # of each step


class RunFailed(RuntimeError):
    """A training run or the export of a commit failed."""


def gpt2(steps: int, batch_size: int, micro_steps: int = 1, gpus: int = 1) -> str:
    """Return options of GPT-2 124M on the builtin text, with one checkpoint after the last step."""
    tokens = batch_size * 1024 * micro_steps * gpus
    sizes = (
        f"--train.steps {steps} --train.batch_size {batch_size} --train.total_batch_tokens {tokens}"
    )
    return f"configs/gpt2_124m.yaml {DATA} {QUIET} {sizes} --optim.warmup 1"


def cases(given: argparse.Namespace) -> list[Case]:
    """Return the runs that the options select."""
    found = []
    gpus = given.gpus
    batch_size = given.batch_size
    if given.time:
        options = f"{gpt2(given.time, batch_size, gpus=gpus)} --model.size {given.size}"
        return [Case(f"{given.size}, batch {batch_size}, GPUs {gpus}", options, gpus)]
    if given.cpu:
        options = "--train.steps 20 --optim.warmup 8 --eval.every 10 --sample.every 0"
        found.append(Case("quickstart", f"configs/quickstart.yaml {options}"))
    if given.gpu:
        run = gpt2(5, batch_size)
        found += [Case(level, f"{run} --memory.recompute {level}") for level in LEVELS]
        found.append(
            Case("2 micro-steps, master fp32", f"{gpt2(5, batch_size, 2)} --optim.master fp32")
        )
        found.append(Case("fp32", f"{run} --train.dtype fp32"))
    # with one torchrun agent ranks use peer copies, with an agent per GPU they use NCCL
    if gpus > 1:
        run = gpt2(5, batch_size, 2, gpus)
        found += [
            Case(f"{gpus} GPUs, copies, ZeRO-{z}", f"{run} --parallel.zero {z}", gpus)
            for z in (1, 0, 2)
        ]
        found.append(Case(f"{gpus} GPUs, NCCL, ZeRO-1", run, gpus, gpus))
    return found


# ---- runs ----


def train(tree: Path, case: Case, work: Path) -> Result:
    """Train in a new directory under `work`, read the result and delete the directory."""
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=work))
    processes = []
    try:
        with open(run_dir / "output.txt", "w+") as output:
            for command, environment in commands(tree, case, run_dir):
                process = subprocess.Popen(
                    command, cwd=work, env=environment, stdout=output, stderr=output
                )
                processes.append(process)
            codes = [process.wait() for process in processes]
            if any(codes):
                output.seek(0)
                last = "\n".join(output.read().splitlines()[-20:])
                raise RunFailed(
                    f"{tree}: {case.name}: train.py {case.options}: exit codes {codes}\n{last}"
                )
        return read_result(run_dir)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(run_dir, ignore_errors=True)


def commands(tree: Path, case: Case, run_dir: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield each process's command line and environment.  Its working directory
    receives the builtin data.
    """
    config, *options = case.options.split()
    words = [str(tree / "train.py"), str(tree / config), *options, "--run_dir", str(run_dir)]
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    if case.gpus == 1:
        yield [sys.executable, *words], environment
        return
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(case.gpus // case.nodes),
    ]
    if case.nodes == 1:
        yield [*torchrun, "--standalone", *words], environment
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun += [
        "--nnodes",
        str(case.nodes),
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(port),
        "--node_rank",
    ]
    for node in range(case.nodes):
        yield [*torchrun, str(node), *words], environment | {"CUDA_VISIBLE_DEVICES": str(node)}


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
    trees: dict[str, Path], case: Case, work: Path, order: tuple[str, ...] = ("old", "new")
) -> dict[str, Any]:
    """Train the case with the trees named in `order`, and return a row of the report."""
    results: dict[str, list[Result]] = {"old": [], "new": []}
    for name in order:
        results[name].append(train(trees[name], case, work))
        print_line(f"{case.name}: {name}: last record {results[name][-1].metrics[-1:]}")
    first, *others = results["old"] + results["new"]
    found = [line for other in others for line in differences(first, other)]
    times = {
        name: [ms for run in runs for ms in run.ms[WARM_STEPS:]] for name, runs in results.items()
    }
    ms = {name: statistics.median(times[name]) for name in times} if len(order) > 2 else {}
    return {"case": case.name, "differences": found, "tensors": len(first.tensors)} | ms


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'case':<36} {'bits':<10} {'tensors':>7} {'old ms':>9} {'new ms':>9} {'new/old':>8}"]
    for row in rows:
        bits = "DIFFERENT" if row["differences"] else "equal"
        times = ""
        if "old" in row:
            times = f" {row['old']:>9.2f} {row['new']:>9.2f} {row['new'] / row['old']:>8.4f}"
        lines.append(f"{row['case']:<36} {bits:<10} {row['tensors']:>7}{times}")
        lines += [f"    {line}" for line in row["differences"]]
    return "\n".join(lines)


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
        raise RunFailed(
            f"{source}: neither a directory with train.py nor a commit: {done.stderr.strip()}"
        )
    tree.mkdir()
    shutil.unpack_archive(archive, tree, filter="data")
    archive.unlink()
    return tree


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the keys of a configuration among the words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="commit or directory")
    parser.add_argument("new", help="commit or directory")
    parser.add_argument("--cpu", action="store_true", help="compare configs/quickstart.yaml")
    parser.add_argument("--gpu", action="store_true", help="compare GPT-2 124M on one GPU")
    parser.add_argument(
        "--gpus", type=int, default=1, help="compare, or time, on this number of GPUs"
    )
    parser.add_argument(
        "--time", type=int, default=0, metavar="STEPS", help="time runs of this number of steps"
    )
    parser.add_argument("--size", default="d12", help="model.size of timed runs")
    parser.add_argument(
        "--batch_size", type=int, default=8, help="sequences of 1024 tokens per GPU and micro-step"
    )
    given, keys = parser.parse_known_args(words)
    if not (given.cpu or given.gpu or given.time or given.gpus > 1):
        parser.error("nothing to compare: expected --cpu, --gpu, --gpus 2 or --time STEPS")
    if given.time and given.time <= WARM_STEPS:
        parser.error(
            f"--time: expected more than the {WARM_STEPS} steps that are "
            f"not timed, got {given.time}"
        )
    unknown = [key for key in keys if key.startswith("--") and "." not in key]
    if unknown:
        parser.error(f"unknown option {unknown[0]}")
    if (given.gpu or given.time or given.gpus > 1) and device.count() < given.gpus:
        found = f"needs {given.gpus} CUDA GPUs, found {device.count()}"
        parser.exit(2, f"error: loss_compare: {found}; --cpu needs none\n")
    return given, keys


def main(words: list[str]) -> int:
    given, keys = parse(words)
    # sys.exit raises, so that `train` kills its run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    order = ("old", "new", "new", "old") if given.time else ("old", "new")
    with tempfile.TemporaryDirectory(prefix="loss_compare-") as directory:
        work = Path(directory)
        try:
            trees = {name: checkout(getattr(given, name), work, name) for name in ("old", "new")}
            selected = [
                case._replace(options=" ".join([case.options, *keys])) for case in cases(given)
            ]
            rows = [compare(trees, case, work, order) for case in selected]
        except RunFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print_line(table(rows))
    return 1 if any(row["differences"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
