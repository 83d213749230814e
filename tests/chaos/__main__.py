"""`python -m tests.chaos`: train under random faults, resume after each, and
compare with an undisturbed run.

A campaign is one run from its first to its last step.  Every start of it gets one fault of
faults.py at a random time.  At the end, weights, moments, the numbers in metrics.jsonl
(without times) and stats.jsonl must be the bytes of a run that nothing disturbed.  The
seed, which is printed, fixes the order of the faults and when they are injected, but not
the timing of the processes.
"""

import collections
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from gpt2_triton.checkpoint.format import list_steps
from gpt2_triton.checkpoint.load import verify
from gpt2_triton.training.metrics import read_metrics
from tests.chaos.faults import TABLE, Injection
from tests.chaos.job import Job, build_shim

TIMES = ("ms", "tok_s", "mfu")
TINY = Path(__file__).with_name("tiny.yaml")
app = App(name="python -m tests.chaos", help=__doc__, help_format="plaintext")


class Chaos:
    """The campaigns of one call, and what they found."""

    def __init__(self, directory: Path, config: Path, keys: list[str], seed: int, silent: float):
        self.directory, self.config, self.keys, self.silent = directory, config, keys, silent
        self.rng = random.Random(seed)
        self.shim = build_shim(directory)
        self.injected: collections.Counter[str] = collections.Counter()
        self.ended: collections.Counter[str] = collections.Counter()
        # seconds from a start that resumes to its first finished step
        self.recovery: list[float] = []
        self.resumes = self.campaigns = self.bytes_lost = 0
        self.problems: list[str] = []
        self._waiting: list[str] = []

    def start(
        self,
        run_dir: Path,
        ranks: int,
        env: dict[str, str] | None = None,
        keys: tuple[str, ...] = (),
    ) -> Job:
        return Job(run_dir, ranks, self.config, [*self.keys, *keys], self.shim, env or {})

    def undisturbed(self, ranks: int) -> tuple[Path, float, float]:
        """Return an undisturbed run's directory, and the seconds to its
        first step and to its end.
        """
        run_dir = self.directory / f"undisturbed_{ranks}"
        job = self.start(run_dir, ranks)
        first = job.wait_for_first_step(limit=3600)
        code, seconds = job.end(self.silent), time.monotonic() - job.started
        if code != 0 or first is None:
            raise SystemExit(
                f"the undisturbed run on {ranks} ranks ended with {code}:\n{job.output()[-2000:]}"
            )
        return run_dir, first, seconds

    def _next_fault(self) -> str:
        """Return the next fault: all of the table in a random order, then all in another."""
        if not self._waiting:
            self._waiting = self.rng.sample(list(TABLE), len(TABLE))
        return self._waiting.pop()

    def campaign(self, ranks: int, wanted: tuple[Path, float, float], deadline: float) -> None:
        """Run once from the first to the last step, with a fault in every
        start until the deadline.
        """
        self.campaigns += 1
        run_dir = self.directory / f"run_{self.campaigns}"
        reference, first_seconds, seconds = wanted
        while True:
            calm = time.monotonic() > deadline
            name = None if calm else self._next_fault()
            fault = TABLE[name] if name else None
            resumes = bool(list_steps(run_dir / "checkpoints"))
            job = self.start(
                run_dir, ranks, fault.env if fault else None, fault.keys if fault else ()
            )
            early = self.rng.random() < 0.25  # during the start
            delay = self.rng.uniform(
                0, first_seconds if early else first_seconds + 0.7 * (seconds - first_seconds)
            )
            if not early:
                self._recovered(job, resumes)
            job.wait(max(0.0, job.started + delay - time.monotonic()))
            if name and fault and job.alive():
                self.injected[name] += 1
                try:
                    fault.inject(
                        Injection(job, run_dir, self.rng, lambda: self.start(run_dir, ranks))
                    )
                except AssertionError as error:
                    self._problem(job, name, str(error))
            last = list_steps(reference / "checkpoints")[-1][1].name
            if (
                name == "suspend a rank"
                and not job.wait(60)
                and (run_dir / "checkpoints" / last).exists()
            ):
                # suspended after the last save: only the launcher waits for it
                job.signal(signal.SIGCONT)
            code = job.end(self.silent)
            self.resumes += resumes
            if code is None:
                self._problem(job, name, f"printed nothing for {self.silent:.0f} s and did not end")
            elif job.traceback():
                self._problem(job, name, f"ended with a traceback and exit code {code}")
            elif code and not (fault and code in fault.codes):
                self._problem(job, name, f"ended with exit code {code}")
            if code == 0:
                return self._compare(run_dir, reference, job)
            self.ended[name or ""] += 1
            if calm or len(self.problems) > 20:
                return None

    def _recovered(self, job: Job, resumes: bool) -> None:
        seconds = job.wait_for_first_step(limit=self.silent)
        if resumes and seconds is not None:
            self.recovery.append(seconds)

    def _problem(self, job: Job, fault: str | None, what: str) -> None:
        self.problems.append(f"start {job.number}, {fault or 'no fault'}: {what}; {job.log}")
        print(f"PROBLEM {self.problems[-1]}", flush=True)

    def _compare(self, run_dir: Path, reference: Path, job: Job) -> None:
        """Count the bytes in which the run's last checkpoint, metrics and statistics
        differ from the reference's.
        """
        lost = 0
        (_, got), (_, want) = (
            list_steps(path / "checkpoints")[-1] for path in (run_dir, reference)
        )
        tensors = [*want.glob("*.safetensors")]
        if got.name != want.name or verify(got):
            lost += sum(file.stat().st_size for file in tensors)
        else:
            lost += sum(
                _differing((got / file.name).read_bytes(), file.read_bytes()) for file in tensors
            )
        for name in ("metrics.jsonl", "stats.jsonl"):
            if (reference / name).exists():
                lost += _differing(_numbers(run_dir / name), _numbers(reference / name))
        if lost:
            self._problem(job, None, f"{run_dir} differs from {reference} in {lost:,} bytes")
            self.bytes_lost += lost
        else:
            shutil.rmtree(run_dir)


def _differing(got: bytes, want: bytes) -> int:
    """Return the number of bytes that differ, with the difference of the lengths."""
    if got == want:
        return 0
    return sum(a != b for a, b in zip(got, want, strict=False)) + abs(len(got) - len(want))


def _numbers(path: Path) -> bytes:
    """Return the lines of a metrics file without their times."""
    records = read_metrics(path) if path.exists() else []
    return "\n".join(
        json.dumps({k: v for k, v in record.items() if k not in TIMES}) for record in records
    ).encode()


@app.default
def chaos(
    *keys: Annotated[str, Parameter(allow_leading_hyphen=True)],
    minutes: float = 60.0,
    seed: int | None = None,
    ranks: tuple[int, ...] = (1, 2),
    config: Path = TINY,
) -> int:
    """Train under random faults and compare with an undisturbed run.

    Parameters
    ----------
    keys: str
        Keys of the configuration, as train.py takes them.
    minutes: float
        Time in which faults are injected; the campaign in progress is then finished without.
    seed: int
        Seed of the faults; by default a random one, which is printed.
    ranks: tuple[int, ...]
        Numbers of ranks, in turn.
    config: Path
        Configuration of the run.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {seed}, {minutes:g} minutes, runs in {directory}", flush=True)
    test = Chaos(directory, config.resolve(), [*keys], seed, silent=300.0)
    wanted = {size: test.undisturbed(size) for size in ranks}
    for size, (_, first, end) in wanted.items():
        print(
            f"undisturbed on {size} ranks: first step after {first:.1f} s, end after {end:.1f} s",
            flush=True,
        )
    began, turn = time.monotonic(), 0
    deadline = began + 60 * minutes
    while time.monotonic() < deadline and len(test.problems) <= 20:
        size = ranks[turn % len(ranks)]
        test.campaign(size, wanted[size], deadline)
        turn += 1
        print(
            f"{(time.monotonic() - began) / 60:.1f} min: campaign {turn} on {size} ranks done; "
            f"{sum(test.injected.values())} faults, {test.resumes} "
            f"resumes, {len(test.problems)} problems",
            flush=True,
        )
    for name in TABLE:
        print(f"{name:22} injected {test.injected[name]:4}  ended the run {test.ended[name]:4}")
    recovery = sorted(test.recovery) or [0.0]
    print(
        f"{sum(test.injected.values())} faults, {test.resumes} resumes, "
        f"{test.bytes_lost} bytes lost; seconds to "
        f"recover: median {statistics.median(recovery):.1f}, "
        f"worst {recovery[-1]:.1f}; {len(test.problems)} problems"
    )
    if not test.problems:
        shutil.rmtree(directory)
    return 1 if test.problems else 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
