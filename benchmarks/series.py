"""Trains a list of runs to their end, one on each GPU at a time, and compares their losses in pairs.

    python -m benchmarks.series FILE --data SHARDS --out RESULTS.jsonl [--minutes M] [--gpus 0,1] [--seeds 0,1,2]
    python -m benchmarks.series FILE --out RESULTS.jsonl --report [--plot FILE.png]

FILE is YAML: `config`, a configuration file; `options` of every run; `arms`, the options of each by its name;
`baseline`, one of them, by default the first; `seeds`, how many runs of each arm.  Runs of one seed, whatever the arm,
have the same initial weights and the same data in the same order.  An arm may set:

    seeds, minutes   its own number of runs, and how long one may take
    program          what trains in place of `gpt2_triton train`: a module of this repository and its first arguments
    best_of          the beginning of other arms' names: it has the options of the one of them whose first run ended at
                     the least validation loss, and its own

Each finished run is one line of RESULTS.jsonl.  A run that is there is not made again, so the same command
resumes a series; with --minutes no run begins that would end later, by the time that the last run of its arm took.

The training loss is the mean of the last fifth of the steps; spikes show in the largest loss_z of a step.
The report gives the mean and standard deviation of each arm, and the mean difference of the pairs with its 95% interval
by Student's t.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gpt2_triton.console import print_line
from gpt2_triton.training.metrics import METRICS, read_metrics
from gpt2_triton.training.run_info import read_run

ROOT = Path(__file__).parents[1]
COLORS = ("#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
POINTS = 200  # of a run's curve that are kept: means of equal numbers of steps
OWN = ("minutes", "program", "best_of")  # keys of an arm that are no options, beside seeds
FIRST_GUESS = 3.0  # minutes of an arm that has not run yet

Result = dict[str, Any]  # a line of RESULTS.jsonl


class Run(NamedTuple):
    arm: str
    seed: int
    options: dict[str, Any]
    minutes: float | None = None  # that the file names
    program: str = "gpt2_triton train"
    best_of: str = ""  # then options are the arm's own


class Series(NamedTuple):
    config: str
    runs: list[Run]  # in the order in which they are made: by seed, then by arm
    baseline: str


def read_series(path: Path) -> Series:
    """Read a series; ValueError if a key is unknown or missing."""
    text = yaml.safe_load(path.read_text())
    unknown = text.keys() - {"config", "options", "arms", "baseline", "seeds"}
    missing = {"config", "arms", "seeds"} - text.keys()
    if unknown or missing:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")
    baseline = text.get("baseline", next(iter(text["arms"])))
    if baseline not in text["arms"]:
        raise ValueError(f"{path}: baseline {baseline} is no arm")
    common, runs = text.get("options") or {}, []
    arms = {name: dict(options or {}) for name, options in text["arms"].items()}
    seeds = {name: options.pop("seeds", text["seeds"]) for name, options in arms.items()}
    own = {name: {key: options.pop(key) for key in OWN if key in options} for name, options in arms.items()}
    for seed in range(max(seeds.values())):
        for name, options in arms.items():
            if seed < seeds[name]:
                seeded = {"train.seed": 42 + seed, "data.seed": 42 + seed}
                shared = {} if "best_of" in own[name] else common
                runs.append(Run(name, seed, shared | options | seeded, **own[name]))
    trials = [run.arm for run in runs if not run.best_of]
    for name, keys in own.items():
        if "best_of" in keys and not any(arm.startswith(keys["best_of"]) for arm in trials):
            raise ValueError(f"{path}: {name}: best_of {keys['best_of']} begins the name of no arm")
    return Series(text["config"], runs, baseline)


# ---- runs ----


def command_of(series: Series, run: Run, data: Path, run_dir: Path) -> list[str]:
    """Return the command line of a run."""
    shards = {"data.train": f"{data}/train_*.bin", "data.val": f"{data}/val_*.bin"}
    words = [sys.executable, "-m", *run.program.split(), str(ROOT / series.config), "--run_dir", str(run_dir)]
    for key, value in (shards | run.options).items():
        words += [f"--{key}", str(value)]
    return words


def result_of(run: Run, run_dir: Path, seconds: float) -> Result | None:
    """Read a run: its losses, its speed and its curve of training loss; None if it ended before its last step."""
    records = read_metrics(run_dir / METRICS)
    steps = [record for record in records if "loss" in record]
    val = [record for record in records if "val_loss" in record]
    losses = [record["loss"] for record in steps]
    ms = [record["ms"] for record in steps if record.get("ms")]
    stride = max(1, len(losses) // POINTS)
    pieces = [losses[i : i + stride] for i in range(0, len(losses) - stride + 1, stride)]
    start = read_run(run_dir)["starts"][-1]
    if len(losses) < start["schedule"]["steps"]:
        return None
    return {
        "arm": run.arm,
        "seed": run.seed,
        "options": run.options,
        "steps": len(losses),
        "train_loss": statistics.fmean(losses[-(len(losses) // 5 or 1) :]),
        "val_loss": val[-1]["val_loss"] if val else None,
        "val_loss_fp8": val[-1].get("val_loss_fp8") if val else None,
        "largest_z": max((record["loss_z"] for record in steps if "loss_z" in record), default=None),
        "ms": statistics.median(ms),
        "tokens": steps[-1]["tokens"],
        "seconds": round(seconds, 1),
        "stride": stride,
        "curve": [round(statistics.fmean(piece), 4) for piece in pieces],
        "commit": (start["git"] or {}).get("commit"),
        "device": start["device"],
        "packages": {name: start["packages"].get(name) for name in ("torch", "triton")},
    }


class Queue:
    """The runs that are left, and the file of results; threads of several GPUs share it."""

    def __init__(self, series: Series, out: Path, minutes: float):
        self.out, self.end, self._changed = out, time.monotonic() + 60 * minutes, threading.Condition()
        self._series, self._rows = series, read_results(out)
        done = {(row["arm"], row["seed"]) for row in self._rows}
        self._left = [run for run in series.runs if (run.arm, run.seed) not in done]
        self._minutes = {row["arm"]: row["seconds"] / 60 for row in self._rows}
        self._running, self._begin, self.failed = 0, time.monotonic(), 0

    def next(self) -> Run | None:
        """Take the first run that can end in time; None if there is none.  Wait for the runs that it depends on."""
        with self._changed:
            while True:
                for run in list(self._left):
                    ready = self._with_options(run)
                    expected = self._minutes.get(run.arm, run.minutes or FIRST_GUESS)
                    if ready and self._is_known(ready):
                        self._left.remove(run)
                    elif ready and time.monotonic() + 60 * expected <= self.end:
                        self._left.remove(run)
                        self._running += 1
                        return ready
                if not (self._running and any(run.best_of for run in self._left)):
                    return None
                self._changed.wait()

    def _with_options(self, run: Run) -> Run | None:
        """Return the run with all its options; None as long as the arms of which it is the best lack a first run."""
        if not run.best_of:
            return run
        found = {row["arm"]: row["val_loss"] for row in self._rows if row["seed"] == 0}
        runs = [r for r in self._series.runs if not r.best_of and r.seed == 0 and r.arm.startswith(run.best_of)]
        if any(found.get(trial.arm) is None for trial in runs):
            return None
        best = min(runs, key=lambda trial: found[trial.arm])
        return run._replace(options=best.options | run.options, program=best.program)

    def _is_known(self, run: Run) -> bool:
        """Return whether another arm's result is of the same run, after adding it as a result of this arm."""
        same = [row for row in self._rows if row["options"] == run.options] if run.best_of else []
        if same:
            self._write(same[0] | {"arm": run.arm})
        return bool(same)

    def _write(self, row: Result) -> None:
        self._rows.append(row)
        with open(self.out, "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def add(self, run: Run, row: Result | None, why: str = "") -> None:
        """Add the result of a run, or `why` there is none."""
        with self._changed:
            self._running -= 1
            if row:
                self._write(row)
                self._minutes[row["arm"]] = row["seconds"] / 60
                elapsed, left = (time.monotonic() - self._begin) / 60, len(self._left)
                val = "" if row["val_loss"] is None else f", val {row['val_loss']:.4f}"
                losses = f"train {row['train_loss']:.4f}{val}, {row['ms']:.2f} ms a step"
                took = f"{row['seconds']:.0f} s; {elapsed:.1f} min, {left} left"
                print_line(f"{run.arm} seed {run.seed}: {losses}, {took}")
            else:
                self.failed += 1
                print_line(f"{run.arm} seed {run.seed}: {why}", error=True)
            self._changed.notify_all()


def work(series: Series, queue: Queue, data: Path, gpu: str, folder: Path) -> None:
    """Make runs on one GPU until the queue has none."""
    while run := queue.next():
        run_dir, begin = folder / f"{run.arm}-{run.seed}".replace(" ", "_").replace("/", "_"), time.monotonic()
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "4"}
        words = command_of(series, run, data, run_dir)
        row, why = None, "its result cannot be read"
        try:
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            last = "\n".join(done.stdout.splitlines()[-8:])
            why = f"not finished, exit code {done.returncode}\n{last}"
            row = None if done.returncode else result_of(run, run_dir, time.monotonic() - begin)
        finally:
            queue.add(run, row, why)  # other GPUs may wait for it
        shutil.rmtree(run_dir, ignore_errors=True)


def train(series: Series, data: Path, out: Path, minutes: float, gpus: Sequence[str]) -> int:
    """Make the runs that RESULTS.jsonl lacks; return the number of runs that failed."""
    queue = Queue(series, out, minutes)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        threads = [threading.Thread(target=work, args=(series, queue, data, gpu, Path(folder))) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return queue.failed


# ---- report ----


def read_results(path: Path) -> list[Result]:
    """Return the results of a file, without a last line that was cut short; none if there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def student_t(freedom: int, probability: float = 0.975) -> float:
    """Return the quantile of Student's t, by Simpson's rule over its density and bisection."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2

    def density(x: float) -> float:
        return math.exp(log_scale - (freedom + 1) / 2 * math.log1p(x * x / freedom))

    def below(x: float, n: int = 2000) -> float:
        h = x / n
        inner = sum((4 if i % 2 else 2) * density(i * h) for i in range(1, n))
        return 0.5 + h / 3 * (density(0) + inner + density(x))

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return low


class Difference(NamedTuple):
    """The mean of the pairs' differences, and half of its 95% interval, infinite for fewer than two pairs."""

    pairs: int
    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} +- {self.half:.4f}"


def difference(rows: Sequence[Result], arm: str, baseline: str, key: str) -> Difference | None:
    """Return what `arm` has more of `key` than `baseline`, over the seeds of both; None without a pair."""
    values = {(row["arm"], row["seed"]): row[key] for row in rows if row.get(key) is not None}
    seeds = sorted({seed for name, seed in values if name == arm and (baseline, seed) in values})
    if not seeds:
        return None
    found = [values[arm, seed] - values[baseline, seed] for seed in seeds]
    n, half = len(found), math.inf
    if n > 1:
        half = student_t(n - 1) * statistics.stdev(found) / math.sqrt(n)
    return Difference(n, statistics.fmean(found), half)


def report(series: Series, rows: Sequence[Result]) -> str:
    """Return the table of a series: a line for each arm that has a result, and its difference from the baseline."""
    arms = list(dict.fromkeys(run.arm for run in series.runs))
    head = (
        "arm",
        "runs",
        "training loss",
        "sd",
        "validation",
        "sd",
        "ms",
        "tok/s",
        "difference in training",
        "in validation",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm in arms:
        mine = [row for row in rows if row["arm"] == arm]
        if not mine:
            continue
        cells = [arm, str(len(mine))]
        for key in ("train_loss", "val_loss"):
            values = [row[key] for row in mine if row[key] is not None]
            cells.append(f"{statistics.fmean(values):.4f}" if values else "")
            cells.append(f"{statistics.stdev(values):.4f}" if len(values) > 1 else "")
        ms = statistics.median(row["ms"] for row in mine)
        tokens = mine[0]["tokens"] / mine[0]["steps"]
        cells += [f"{ms:.2f}", f"{1e3 * tokens / ms:,.0f}"]
        for key in ("train_loss", "val_loss"):
            found = None if arm == series.baseline else difference(rows, arm, series.baseline, key)
            cells.append(f"{found} ({found.pairs})" if found else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(series: Series, rows: Sequence[Result], out: Path) -> None:
    """Draw the training loss of each arm, the mean of its runs, over minutes of its own step time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for arm, color in zip(dict.fromkeys(run.arm for run in series.runs), COLORS * 9):
        mine = [row for row in rows if row["arm"] == arm]
        if not mine:
            continue
        points = min(len(row["curve"]) for row in mine)
        means = [statistics.fmean(row["curve"][i] for row in mine) for i in range(points)]
        step = mine[0]["stride"] * statistics.median(row["ms"] for row in mine) / 60e3
        axes.plot([(i + 0.5) * step for i in range(points)], means, color=color, lw=1.4, label=arm)
    tokens = max(row["tokens"] for row in rows)
    axes.set(xlabel="minutes of training on one GPU", ylabel="training loss", title=f"{tokens / 1e6:.0f}M tokens")
    low = min(min(row["curve"]) for row in rows)
    axes.set_ylim(low - 0.05, low + 2.5)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="the series, YAML")
    parser.add_argument("--out", type=Path, required=True, help="results, a JSON object per run and line")
    parser.add_argument("--data", type=Path, help="directory of train_*.bin and val_*.bin")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run that would end later")
    parser.add_argument("--gpus", default="0", help="comma-separated numbers of the GPUs to use")
    parser.add_argument("--seeds", help="comma-separated numbers of the seeds to train; by default all")
    parser.add_argument("--report", action="store_true", help="train nothing, print the table")
    parser.add_argument("--plot", type=Path, help="PNG of training loss over minutes")
    a = parser.parse_args(words)
    try:
        series = read_series(a.file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    failed = 0
    if a.seeds:
        series = series._replace(runs=[run for run in series.runs if str(run.seed) in a.seeds.split(",")])
    if not a.report:
        if a.data is None:
            parser.error("--data: expected the directory of the shards, as python -m benchmarks.corpus makes")
        failed = train(series, a.data, a.out, a.minutes, a.gpus.split(","))
    rows = read_results(a.out)
    print(report(series, rows))
    if a.plot and rows:
        plot(series, rows, a.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
