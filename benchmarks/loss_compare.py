"""Trains the same runs with two versions of the code and compares the bits of their results, or their speed.

    python -m benchmarks.loss_compare OLD NEW --cpu             configs/quickstart.yaml, 20 steps
    python -m benchmarks.loss_compare OLD NEW --gpu             GPT-2 124M, 5 steps at each recompute level, and fp32
    python -m benchmarks.loss_compare OLD NEW --gpus 2          the same on 2 GPUs: ZeRO stages by peer copies, and NCCL
    python -m benchmarks.loss_compare OLD NEW --time 60 --size d12 --batch_size 64

OLD and NEW are commits of this repository or directories with a checkout.  The comparison covers all numbers in
metrics.jsonl except times, and the sha256 of each tensor of the last checkpoint: weights, moments, master bits.
--time trains in the order old, new, new, old, compares losses and norms, and prints the median ms per step.
The exit code is 1 if a bit differs, 2 if a run fails.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton import device
from gpt2_triton.console import print_line

ROOT = Path(__file__).parents[1]
TIMES = {"ms", "tok_s", "mfu"}  # keys of metrics.jsonl that differ between equal runs
LEVELS = ("none", "gelu", "gelu+ln", "gelu+ln+qkv", "block")
WARM_STEPS = 10  # not timed: clocks settle, and the first steps capture CUDA graphs
ROOM = 24 << 30  # bytes that must be free in /dev/shm: a run refuses to start without those for its checkpoint
DATA = "--data.train builtin --data.val builtin --data.tokenizer bytes"  # bytes are valid ids of GPT-2's vocabulary
QUIET = "--eval.every 0 --eval.hellaswag_every 0 --sample.every 0 --checkpoint.every 0 --checkpoint.major 0"


class Case(NamedTuple):
    """A run: its configuration file and options for train.py, relative to the checkout."""

    name: str
    options: str
    gpus: int = 1
    nodes: int = 1  # torchrun agents on this host; with several, ranks exchange through NCCL


class Result(NamedTuple):
    metrics: list[dict[str, Any]]  # without times
    tensors: dict[str, str]  # sha256 by "file: tensor"
    ms: list[float]  # of each step


class RunFailed(RuntimeError):
    """A training run or the export of a commit failed, or no case was selected."""


# ---- the cases ----


def cpu_cases(steps: int) -> list[Case]:
    options = f"--train.steps {steps} --optim.warmup {min(8, steps)} --eval.every 10 --sample.every 0"
    return [Case("quickstart", f"configs/quickstart.yaml {options}")]


def gpt2(steps: int, batch_size: int, micro_steps: int = 1, gpus: int = 1) -> str:
    """Return options of GPT-2 124M on the builtin text, with one checkpoint after the last step."""
    tokens = batch_size * 1024 * micro_steps * gpus
    sizes = f"--train.steps {steps} --train.batch_size {batch_size} --train.total_batch_tokens {tokens}"
    return f"configs/gpt2_124m.yaml {DATA} {QUIET} {sizes} --optim.warmup 1"


def gpu_cases(steps: int, batch_size: int) -> list[Case]:
    """Return each recompute level, two micro-steps with master weights, and fp32."""
    run = gpt2(steps, batch_size)
    cases = [Case(level, f"{run} --memory.recompute {level}") for level in LEVELS]
    cases.append(Case("2 micro-steps, master fp32", f"{gpt2(steps, batch_size, 2)} --optim.master fp32"))
    return [*cases, Case("fp32", f"{run} --train.dtype fp32")]


def gpus_cases(steps: int, batch_size: int, gpus: int) -> list[Case]:
    """Return ZeRO stages with one torchrun agent, which uses peer copies, and an agent per GPU, which uses NCCL."""
    run = gpt2(steps, batch_size, 2, gpus)
    cases = [Case(f"{gpus} GPUs, copies, ZeRO-{zero}", f"{run} --parallel.zero {zero}", gpus) for zero in (1, 0, 2)]
    return [*cases, Case(f"{gpus} GPUs, NCCL, ZeRO-1", run, gpus, gpus)]


def timed_case(steps: int, batch_size: int, size: str, recompute: str, gpus: int) -> Case:
    options = f"{gpt2(steps, batch_size, gpus=gpus)} --model.size {size} --memory.recompute {recompute}"
    return Case(f"{size}, batch {batch_size}, {recompute}, GPUs {gpus}", options, gpus)


# ---- runs ----


def train(tree: Path, case: Case, work: Path, stop_after: int = 0) -> Result:
    """Train in a new directory under `work`, read the result and delete the directory.

    With `stop_after` the run is killed after that many steps, before it writes a checkpoint.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=work))
    try:
        with open(run_dir / "output.txt", "w+") as output:
            processes = [
                subprocess.Popen(command, cwd=work, env=environment, stdout=output, stderr=subprocess.STDOUT)
                for command, environment in commands(tree, case, run_dir)
            ]
            stopped = _wait(processes, run_dir, stop_after)
            codes = [process.returncode for process in processes]
            if any(codes) and not stopped:
                output.seek(0)
                last = "\n".join(output.read().splitlines()[-20:])
                raise RunFailed(f"{tree}: {case.name}: train.py {case.options}: exit codes {codes}\n{last}")
        return read_result(run_dir, checkpoint=not stopped)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def commands(tree: Path, case: Case, run_dir: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the command line and environment of each process.  The builtin data is made in the working directory."""
    config, *options = case.options.split()
    words = [str(tree / "train.py"), str(tree / config), *options, "--run_dir", str(run_dir)]
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    if case.gpus == 1:
        yield [sys.executable, *words], environment
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(case.gpus // case.nodes)]
    if case.nodes == 1:
        yield [*torchrun, "--standalone", *words], environment
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun += ["--nnodes", str(case.nodes), "--master_addr", "127.0.0.1", "--master_port", str(port), "--node_rank"]
    for node in range(case.nodes):
        yield [*torchrun, str(node), *words], environment | {"CUDA_VISIBLE_DEVICES": str(node)}


def _wait(processes: list[subprocess.Popen], run_dir: Path, stop_after: int) -> bool:
    """Wait for the end; return True if the run was killed after `stop_after` steps."""
    try:
        while stop_after and processes[0].poll() is None:
            if len(_records(run_dir, "ms")) >= stop_after:
                return True
            time.sleep(0.1)
        for process in processes:
            process.wait()
        return False
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _records(run_dir: Path, key: str = "step") -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl that have the key, without a last line that is not complete."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [record for line in lines if line.endswith("\n") and key in (record := json.loads(line))]


def read_result(run_dir: Path, checkpoint: bool = True) -> Result:
    """Return the metrics of a run directory and, if `checkpoint`, the tensors of its last checkpoint."""
    metrics = [{key: value for key, value in record.items() if key not in TIMES} for record in _records(run_dir)]
    tensors: dict[str, str] = {}
    if checkpoint:
        last = max((run_dir / "checkpoints").glob("step_*"))
        for path in sorted(last.glob("*.safetensors")):
            tensors |= {f"{path.name}: {name}": digest for name, digest in tensor_hashes(path).items()}
    return Result(metrics, tensors, [record["ms"] for record in _records(run_dir, "ms")])


def tensor_hashes(path: Path) -> dict[str, str]:
    """Return the sha256 of dtype, shape and bytes of each tensor in a safetensors file.

    The file holds 8 bytes with the length of the header, the header as JSON, and the data.
    """
    hashes = {}
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        for name in sorted(header.keys() - {"__metadata__"}):
            begin, end = header[name]["data_offsets"]
            file.seek(start + begin)
            data = file.read(end - begin)
            if len(data) < end - begin:
                raise ValueError(f"{path}: ends within tensor {name}, {end - begin - len(data):,} bytes are missing")
            digest = hashlib.sha256(f"{header[name]['dtype']} {header[name]['shape']} ".encode())
            digest.update(data)
            hashes[name] = digest.hexdigest()
    return hashes


# ---- comparison ----


def differences(old: Result, new: Result) -> list[str]:
    """Return one line for the first record of metrics.jsonl that differs, and one for each tensor that differs."""
    lines = []
    for then, now in zip(old.metrics, new.metrics):
        if then != now:
            keys = sorted(key for key in then.keys() | now.keys() if then.get(key) != now.get(key))
            lines.append(f"step {then['step']}: " + ", ".join(f"{k} {then.get(k)} != {now.get(k)}" for k in keys))
            break
    if len(old.metrics) != len(new.metrics):
        lines.append(f"records in metrics.jsonl: {len(old.metrics)} != {len(new.metrics)}")
    if not old.ms:
        lines.append("no step was logged")
    for name in sorted(old.tensors.keys() | new.tensors.keys()):
        then, now = (result.tensors.get(name, "missing")[:12] for result in (old, new))
        if old.tensors.get(name) != new.tensors.get(name):
            lines.append(f"{name}: sha256 {then} != {now}")
    return lines


def compare(trees: dict[str, Path], case: Case, work: Path) -> dict[str, Any]:
    """Train the case with both trees and return a row of the report."""
    results = {}
    for name, tree in trees.items():
        begin = time.monotonic()
        results[name] = train(tree, case, work)
        print_line(f"{case.name}: {name}: {time.monotonic() - begin:.0f} s, last record {results[name].metrics[-1:]}")
    found = differences(results["old"], results["new"])
    return {"case": case.name, "differences": found, "tensors": len(results["old"].tensors)}


def compare_times(trees: dict[str, Path], case: Case, work: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Train `rounds` times in the order old, new, new, old and return a row with the median ms per step."""
    runs: dict[str, list[Result]] = {"old": [], "new": []}
    for name in ("old", "new", "new", "old") * rounds:
        result = train(trees[name], case, work, steps if case.gpus == 1 else 0)
        steps_done = [record for record in result.metrics if record["step"] <= steps]
        runs[name].append(result._replace(metrics=steps_done, ms=result.ms[WARM_STEPS:steps]))
        print_line(f"{case.name}: {name}: median {statistics.median(runs[name][-1].ms):.2f} ms")
    first, *others = runs["old"] + runs["new"]
    row = {"case": case.name, "differences": [line for run in others for line in differences(first, run)]}
    row |= {name: statistics.median(ms for run in runs[name] for ms in run.ms) for name in runs}
    medians = {name: [statistics.median(run.ms) for run in runs[name]] for name in runs}
    return row | {"tensors": len(first.tensors), "medians": medians}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'case':<36} {'bits':<10} {'tensors':>7} {'old ms':>9} {'new ms':>9} {'new/old':>8}"]
    for row in rows:
        bits = "DIFFERENT" if row["differences"] else "equal"
        times = f" {row['old']:>9.2f} {row['new']:>9.2f} {row['new'] / row['old']:>8.4f}" if "old" in row else ""
        lines.append(f"{row['case']:<36} {bits:<10} {row['tensors']:>7}{times}")
        lines += [f"    {line}" for line in row["differences"]]
    return "\n".join(lines)


def checkout(source: str, work: Path, name: str) -> Path:
    """Return the directory `source`, or a new one under `work` with the files of the commit `source`."""
    if (Path(source) / "train.py").is_file():
        return Path(source).resolve()
    tree, archive = work / name, work / f"{name}.tar"
    done = subprocess.run(["git", "-C", ROOT, "archive", "-o", archive, source], capture_output=True, text=True)
    if done.returncode:
        raise RunFailed(f"{source}: neither a directory with train.py nor a commit: {done.stderr.strip()}")
    tree.mkdir()
    shutil.unpack_archive(archive, tree, filter="data")
    archive.unlink()
    return tree


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="commit or directory")
    parser.add_argument("new", help="commit or directory")
    parser.add_argument("--cpu", action="store_true", help="compare configs/quickstart.yaml")
    parser.add_argument("--gpu", action="store_true", help="compare GPT-2 124M on one GPU")
    parser.add_argument("--gpus", type=int, default=1, help="compare, or time, on this number of GPUs")
    parser.add_argument("--time", type=int, default=0, metavar="STEPS", help="time runs of this number of steps")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of old, new, new, old")
    parser.add_argument("--size", default="d12", help="model.size of timed runs")
    parser.add_argument("--recompute", default="gelu", help="memory.recompute of timed runs")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences of 1024 tokens per GPU and micro-step")
    parser.add_argument("--steps", type=int, help="steps of compared runs; default 20 with --cpu, else 5")
    parser.add_argument("--only", default="", help="compare only the cases whose names contain this")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--work", type=Path, help="directory for runs; default /dev/shm if it has room, else $TMPDIR")
    given = parser.parse_args(words)
    if given.time and given.time <= WARM_STEPS:
        parser.error(f"--time: expected more than the {WARM_STEPS} steps that are not timed, got {given.time}")
    if not (given.cpu or given.gpu or given.time or given.gpus > 1):
        parser.error("expected --cpu, --gpu, --gpus 2 or --time STEPS")
    if (given.gpu or given.time or given.gpus > 1) and device.count() < given.gpus:
        parser.exit(2, f"error: loss_compare: needs {given.gpus} CUDA GPUs, found {device.count()}; --cpu needs none\n")
    return given


def selected_cases(given: argparse.Namespace) -> list[Case]:
    """Return the cases to compare.  With --time, --gpus is the number of GPUs of the timed run."""
    cases = cpu_cases(given.steps or 20) if given.cpu else []
    cases += gpu_cases(given.steps or 5, given.batch_size) if given.gpu else []
    if given.gpus > 1 and not given.time:
        cases += gpus_cases(given.steps or 5, given.batch_size, given.gpus)
    return [case for case in cases if given.only in case.name]


def main(words: list[str]) -> int:
    given, shm = parse(words), Path("/dev/shm")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, after which the run under way is killed too
    where = given.work or (shm if shm.is_dir() and shutil.disk_usage(shm).free > ROOM else None)
    with tempfile.TemporaryDirectory(prefix="loss_compare-", dir=where) as directory:
        work = Path(directory)
        print_line(f"runs in {work}")
        try:
            trees = {name: checkout(getattr(given, name), work, name) for name in ("old", "new")}
            rows = [compare(trees, case, work) for case in selected_cases(given)]
            if given.time:
                # a run on one GPU is killed after the timed steps, before it would save its checkpoint
                steps = given.time + (1000 if given.gpus == 1 else 0)
                case = timed_case(steps, given.batch_size, given.size, given.recompute, given.gpus)
                rows.append(compare_times(trees, case, work, given.time, given.rounds))
            if not rows:
                raise RunFailed(f"--only {given.only}: no selected case has this in its name")
        except RunFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print_line(table(rows))
    if given.json:
        given.json.write_text(json.dumps({"old": given.old, "new": given.new, "rows": rows}, indent=1) + "\n")
    return 1 if any(row["differences"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
