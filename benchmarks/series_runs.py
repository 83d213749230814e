"""Makes the runs of a series: which is next, the processes that train, and their end by a signal."""

import contextlib
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.series_file import ROOT, Run, Series, with_trial
from benchmarks.series_results import (
    Result,
    append_result,
    best_trial,
    data_digest,
    differing_rows,
    read_results,
    same_run,
)
from gpt2_triton import device
from gpt2_triton.console import print_line
from gpt2_triton.errors import UserError
from gpt2_triton.training.metrics import METRICS, read_metrics
from gpt2_triton.training.run_info import read_run

POINTS = 200  # of a run's curve that are kept: means of equal numbers of steps
FIRST_GUESS = 3.0  # minutes of an arm that has not run yet
GRACE = 20.0  # seconds between a signal to a run and SIGKILL
POLL = 0.2  # seconds between two looks at signals
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(UserError):
    """A signal ended the series."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number


def command_of(series: Series, run: Run, data: Path, run_dir: Path) -> list[str]:
    """Return the command line of a run."""
    shards = {"data.train": f"{data}/train_*.bin", "data.val": f"{data}/val_*.bin"}
    words = [sys.executable, "-m", *run.program.split(), str(ROOT / series.config), "--run_dir", str(run_dir)]
    for key, value in (shards | run.options).items():
        words += [f"--{key}", str(value)]
    return words


def environment_of(gpu: str) -> dict[str, str]:
    """Return the environment of a run on the GPU of this number among those that this process sees.  Without a GPU the
    kernels run in the interpreter, also those of programs that import Triton first.
    """
    if not device.present():
        return os.environ | {"TRITON_INTERPRET": "1"}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return os.environ | {"CUDA_VISIBLE_DEVICES": seen.split(",")[int(gpu)] if seen else gpu, "OMP_NUM_THREADS": "4"}


def result_of(series: Series, run: Run, run_dir: Path, data: str, seconds: float) -> Result | None:
    """Read a run: its losses, its speed and its curve of training loss; None if it ended before its last step.  A loss
    that is not finite counts as the one before it.  `data` is the digest of the run's shards.
    """
    records = read_metrics(run_dir / METRICS)
    steps = [record for record in records if "loss" in record]
    val = [record for record in records if "val_loss" in record]
    losses = list(accumulate((record["loss"] for record in steps), lambda last, loss: last if loss is None else loss))
    ms = [record["ms"] for record in steps if record.get("ms")]
    stride = max(1, len(losses) // POINTS)
    pieces = [losses[i : i + stride] for i in range(0, len(losses) - stride + 1, stride)]
    start = read_run(run_dir)["starts"][-1]
    if len(losses) < start["schedule"]["steps"]:
        return None
    return {
        "arm": run.arm,
        "seed": run.seed,
        "config": series.config,
        "program": run.program,
        "options": run.options,
        "data": data,
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

    def __init__(self, series: Series, out: Path, minutes: float, chosen: Collection[Run] | None = None):
        """`chosen`: the runs to make; None for all."""
        self.out, self.end, self._changed = out, time.monotonic() + 60 * minutes, threading.Condition()
        self._series, self._rows = series, read_results(out)
        done = {(row["arm"], row["seed"]) for row in self._rows}
        runs = series.runs if chosen is None else chosen
        self._left = [run for run in runs if (run.arm, run.seed) not in done]
        self._minutes = {row["arm"]: row["seconds"] / 60 for row in self._rows}
        self._running, self._begin, self.failed, self._is_closed = 0, time.monotonic(), 0, False

    @property
    def left(self) -> list[Run]:
        """The runs that were not taken."""
        return list(self._left)

    def next(self) -> Run | None:
        """Take the first run that can end in time; None if there is none.  Wait for the runs that it depends on."""
        with self._changed:
            while not self._is_closed:
                for run in list(self._left):
                    ready = self._with_options(run)
                    expected = self._minutes.get(run.arm, run.minutes or FIRST_GUESS)
                    if ready and (self._is_refused(ready) or self._is_known(ready)):
                        self._left.remove(run)
                    elif ready and time.monotonic() + 60 * expected <= self.end:
                        self._left.remove(run)
                        self._running += 1
                        return ready
                if not (self._running and any(run.best_of for run in self._left)):
                    return None
                self._changed.wait()
            return None

    def _with_options(self, run: Run) -> Run | None:
        """Return the run with all its options; None as long as the arms of which it is the best lack a first run."""
        if not run.best_of:
            return run
        best = best_trial(self._series, self._rows, run)
        return with_trial(run, best) if best else None

    def _is_refused(self, run: Run) -> bool:
        """Return whether the arm has results of another trial, the best before the last one ended."""
        wrong = differing_rows(self._series, self._rows, self.out, run.arm) if run.best_of else []
        if wrong:
            self._fail(run, f"not made: {wrong[0]}")
        return bool(wrong)

    def _is_known(self, run: Run) -> bool:
        """Return whether another arm's result is of the same run, after adding it as a result of this arm."""
        same = [row for row in self._rows if same_run(row, run)] if run.best_of else []
        if same:
            self._write(same[0] | {"arm": run.arm})
        return bool(same)

    def _write(self, row: Result) -> None:
        self._rows.append(row)
        try:
            append_result(self.out, row)
        except OSError as error:
            self._is_closed = True  # other results would be lost too
            self.failed += 1
            lost = f"the result of {row['arm']} seed {row['seed']} is lost, and no other run begins"
            print_line(f"error: {self.out}: cannot be written ({error.strerror}): {lost}", error=True)

    def _fail(self, run: Run, why: str) -> None:
        self.failed += 1
        print_line(f"{run.arm} seed {run.seed}: {why}", error=True)

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
                self._fail(run, why)
            self._changed.notify_all()

    def close(self, failed: int = 0) -> None:
        """Give out no other run, and count `failed` more failures."""
        with self._changed:
            self._is_closed = True
            self.failed += failed
            self._changed.notify_all()


class Processes:
    """The processes that train, each with those that it starts; after a first signal none begins."""

    def __init__(self) -> None:
        self.stopped, self._lock, self._running = False, threading.Lock(), set[subprocess.Popen[str]]()

    def run(self, words: Sequence[str], environment: dict[str, str]) -> tuple[int, str] | None:
        """Wait for a process; return its exit code and what it has printed, or None if it was not to begin."""
        with self._lock:
            if self.stopped:
                return None
            process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C in a terminal reaches it through `send` alone
            )
            self._running.add(process)
        output, _ = process.communicate()
        with self._lock:
            self._running.discard(process)
            if self.stopped:
                _send_to_group(process, signal.SIGKILL)  # what it has started and left
        return process.returncode, output

    def send(self, number: int) -> None:
        """Send a signal to all that run."""
        with self._lock:
            self.stopped = True
            for process in self._running:
                _send_to_group(process, number)


def _send_to_group(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class Signals:
    """Records, in its `with` block, the signals that end a series."""

    def __init__(self) -> None:
        self.first, self.count = 0, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in STOPPING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, _frame: Any) -> None:
        self.first, self.count = self.first or number, self.count + 1

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def train(
    series: Series,
    data: Path,
    out: Path,
    minutes: float = math.inf,
    gpus: Sequence[str] = ("0",),
    chosen: Collection[Run] | None = None,
) -> int:
    """Make the runs that RESULTS.jsonl lacks; return the number of runs that failed.

    StoppedError after SIGINT, SIGTERM or SIGHUP, when all processes have ended.
    """
    queue, processes = Queue(series, out, minutes, chosen), Processes()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    with Signals() as signals, tempfile.TemporaryDirectory(dir=shared, ignore_cleanup_errors=True) as folder:
        arguments = (series, queue, processes, data)
        threads = [threading.Thread(target=_work, args=(*arguments, gpu, Path(folder))) for gpu in gpus]
        for thread in threads:
            thread.start()
        while not signals.count and (alive := [thread for thread in threads if thread.is_alive()]):
            alive[0].join(POLL)
        if signals.count:
            queue.close()
            _stop(threads, processes, signals)
    if signals.count:
        made = len(read_results(out))
        name = signal.Signals(signals.first).name
        raise StoppedError(signals.first, f"stopped by {name}: {out} has {made} results; the same command continues")
    if (left := queue.left) and not queue.failed:
        why = "no time is left for them, or the trials of which they are the best have no validation loss"
        print_line(f"{len(left)} runs are not made, the first is {left[0].arm} seed {left[0].seed}: {why}", error=True)
    return queue.failed


def _stop(threads: Sequence[threading.Thread], processes: Processes, signals: Signals) -> None:
    """End all processes and wait for their threads: by SIGTERM each second, since a training process saves a checkpoint
    after the first and ends at once after the second; by SIGKILL after GRACE seconds or another signal to this process.
    """
    end = time.monotonic() + GRACE
    while alive := [thread for thread in threads if thread.is_alive()]:
        is_late = signals.count > 1 or time.monotonic() >= end
        processes.send(signal.SIGKILL if is_late else signal.SIGTERM)
        alive[0].join(1)


def _work(series: Series, queue: Queue, processes: Processes, data: Path, gpu: str, folder: Path) -> None:
    """Make runs on one GPU until the queue has none."""
    try:
        while run := queue.next():
            run_dir = folder / f"{run.arm}-{run.seed}".replace(" ", "_").replace("/", "_")
            try:
                row, why = _make(series, run, processes, data, gpu, run_dir)
            except Exception:
                row, why = None, f"its result cannot be read\n{traceback.format_exc()}"
            if processes.stopped and row is None:
                return
            queue.add(run, row, why)  # other GPUs may wait for it
            shutil.rmtree(run_dir, ignore_errors=True)
    except BaseException:
        queue.close(failed=1)
        raise


def _make(
    series: Series, run: Run, processes: Processes, data: Path, gpu: str, run_dir: Path
) -> tuple[Result | None, str]:
    """Train; return the result, or None and why there is none."""
    begin = time.monotonic()
    done = processes.run(command_of(series, run, data, run_dir), environment_of(gpu))
    if done is None:
        return None, "not begun"
    code, output = done
    last = "\n".join(output.splitlines()[-8:])
    row = None if code else result_of(series, run, run_dir, data_digest(data), time.monotonic() - begin)
    if row is not None:
        row["gpu"] = gpu  # its number: times of different GPUs of a host differ by 1 to 2%
    return row, f"not finished, exit code {code}\n{last}"
