"""The table of faults.  Each is injected into a running job; some end it, the others must not."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpt2_triton.checkpoint.format import list_steps
from gpt2_triton.checkpoint.load import verify
from tests.chaos.job import Job

ENDED_BY_SIGNAL = {-9, 1}  # of a rank alone, of torchrun
# of torchrun, a run directory that cannot be written, a checkpoint that cannot be saved
REFUSED = {1, 2, 4}


class Fault(NamedTuple):
    inject: Callable[["Injection"], None]
    codes: set[int]  # exit codes that the job may end with; 0 is always allowed
    env: dict[str, str] = {}  # noqa: RUF012
    keys: tuple[str, ...] = ()  # of the job that it is injected into


class Injection(NamedTuple):
    job: Job
    run_dir: Path
    rng: random.Random
    start: Callable[[], Job]  # starts the same job once more

    def hold(self, name: str, value: int = 1, most: float = 8.0) -> None:
        """Hold a fault of storage for a random time, at most `most` seconds."""
        with self.job.fault(name, value):
            self.job.wait(self.rng.uniform(0.5, most))


def kill_rank(i: Injection) -> None:
    i.job.signal(signal.SIGKILL, i.rng.choice(i.job.rank_pids()))


def kill_all(i: Injection) -> None:
    i.job.signal(signal.SIGKILL)


def suspend(i: Injection) -> None:
    """Suspend a rank: among several it is found and the job ends; alone, or a launcher
    without ranks, it continues.
    """
    pid = i.rng.choice(i.job.rank_pids())
    i.job.signal(signal.SIGSTOP, pid)
    if pid == i.job.process.pid:
        i.job.wait(i.rng.uniform(0.5, 5))
        i.job.signal(signal.SIGCONT, pid)


def terminate(i: Injection) -> None:
    i.job.signal(signal.SIGTERM, i.job.process.pid)


def interrupt(i: Injection) -> None:
    i.job.signal(signal.SIGINT, i.job.process.pid)


def terminate_one_rank(i: Injection) -> None:
    i.job.signal(signal.SIGTERM, i.rng.choice(i.job.rank_pids()))


def newest_intact(i: Injection) -> Path | None:
    """Kill the job and return the newest checkpoint, if an older one is intact too."""
    kill_all(i)
    i.job.process.wait()
    intact = [path for _, path in list_steps(i.run_dir / "checkpoints") if not verify(path)]
    return intact[-1] if len(intact) > 1 else None


def flip_bit(i: Injection) -> None:
    if path := newest_intact(i):
        file = i.rng.choice(sorted(path.iterdir()))
        data = bytearray(file.read_bytes())
        data[i.rng.randrange(len(data))] ^= 1 << i.rng.randrange(8)
        file.write_bytes(data)


def delete_file(i: Injection) -> None:
    if path := newest_intact(i):
        i.rng.choice(sorted(path.iterdir())).unlink()


def cut_line(i: Injection) -> None:
    """Leave an incomplete line at the end of the metrics, as a crash does."""
    kill_all(i)
    i.job.process.wait()
    if (i.run_dir / "metrics.jsonl").exists():
        with open(i.run_dir / "metrics.jsonl", "ab") as file:
            file.write(b'{"step": 3, "lo')


def second_writer(i: Injection) -> None:
    """Start the same run once more: it must be refused, and name the
    process that has the directory.
    """
    second = i.start()
    code = second.end(silent=120)
    if i.job.alive() and (code == 0 or f"pid {i.job.rank_pids()[0]}" not in second.output()):
        raise AssertionError(f"a second writer was not refused: exit code {code}, {second.log}")


def ended_by(number: int) -> set[int]:
    """Return the exit codes of a job that gets a signal: its own, Python's without a handler, which
    it has none of while it exits, and torchrun's.
    """
    return {128 + number, -number, 1}


FULL = Fault(lambda i: i.hold("full"), REFUSED)
DEAD_WANDB = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
TABLE = {
    "kill a rank": Fault(kill_rank, ENDED_BY_SIGNAL),
    "kill all": Fault(kill_all, ENDED_BY_SIGNAL),
    "suspend a rank": Fault(suspend, {1}),
    "SIGTERM": Fault(terminate, ended_by(signal.SIGTERM)),
    "SIGINT": Fault(interrupt, ended_by(signal.SIGINT)),
    "SIGTERM to one rank": Fault(terminate_one_rank, ended_by(signal.SIGTERM)),
    "disk full": FULL,
    "read-only": Fault(lambda i: i.hold("read_only"), REFUSED),
    "slow storage": Fault(lambda i: i.hold("slow", 50_000), set()),
    "bit flip": Fault(flip_bit, ENDED_BY_SIGNAL),
    "file deleted": Fault(delete_file, ENDED_BY_SIGNAL),
    "line cut": Fault(cut_line, ENDED_BY_SIGNAL),
    # of the first, if the second has the directory before it
    "second writer": Fault(second_writer, {2, 1}),
    "dead wandb": Fault(
        lambda i: time.sleep(0), set(), env=DEAD_WANDB, keys=("--log.wandb", "online")
    ),
}
