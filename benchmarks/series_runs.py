"""Makes the runs of a series: which is next, and the processes that train."""

import json
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

from benchmarks.series_file import ROOT, Run, Series
from benchmarks.series_results import Result, read_results
from gpt2_triton.console import print_line
from gpt2_triton.training.metrics import METRICS, read_metrics
from gpt2_triton.training.run_info import read_run

POINTS = 200  # of a run's curve that are kept: means of equal numbers of steps
FIRST_GUESS = 3.0  # minutes of an arm that has not run yet


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
