"""One start of a training run as a tree of processes: its ranks, its
output, the faults of storage.
"""

import contextlib
import itertools
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ("full", "read_only", "slow")  # the order of shim.c's control file
STEP_LINE = re.compile(r"^step +([0-9]+)/[0-9]+ \| loss", re.MULTILINE)
TRACEBACK = "Traceback (most recent call last)"
# torchrun itself ends with a traceback when a rank fails or a signal arrives
OF_TORCHRUN = re.compile(
    re.escape(TRACEBACK)
    + r"(?:(?!Traceback).)*?^torch\.distributed\.elastic\.[^\n]*(?:Error|Exception)",
    re.M | re.S,
)
numbers = itertools.count(1)


def build_shim(directory: Path) -> Path:
    """Compile shim.c into `directory` and return the library."""
    library = directory / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


class Job:
    """A running `train.py` on `ranks` ranks; its output goes to a file, named
    by the number of the start.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: int,
        config: Path,
        keys: list[str],
        shim: Path,
        env: dict[str, str],
    ):
        self.ranks, self.number = ranks, next(numbers)
        self.log = run_dir.with_name(f"{run_dir.name}.start_{self.number}.log")
        self.control = self.log.with_suffix(".control")
        self.control.write_bytes(bytes(8 * len(FAULTS)))
        self._token = f"{os.getpid()}-{self.number}"
        own = dict(
            CHAOS_JOB=self._token, CHAOS_CONTROL=str(self.control), CHAOS_ROOT=str(run_dir.parent)
        )
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            if ranks > 1
            else []
        )
        command = [
            sys.executable,
            *launcher,
            "train.py",
            str(config),
            "--run_dir",
            str(run_dir),
            "--resume",
            *keys,
        ]
        self.started = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | own | {"LD_PRELOAD": str(shim), "PYTHONUNBUFFERED": "1"} | env,
            )

    # ---- processes ----

    def pids(self) -> dict[int, dict[str, str]]:
        """Return the environment of each live process of this job, by process id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError, ValueError):
                pairs = path.read_bytes().decode(errors="replace").split("\0")
                env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                if env.get("CHAOS_JOB") == self._token:
                    found[int(path.parent.name)] = env
        return found

    def rank_pids(self) -> list[int]:
        """Return the process ids of the ranks that train, by rank; of a launcher that
        has started none, its own.
        """
        if self.ranks == 1:
            return [self.process.pid]
        running = [
            (env["RANK"], pid)
            for pid, env in self.pids().items()
            if "RANK" in env and _is_trainer(pid)
        ]
        return [pid for _, pid in sorted(running)] or [self.process.pid]

    def signal(self, number: int, pid: int | None = None) -> None:
        """Send a signal to `pid`, or to every process of the job."""
        for one in [pid] if pid else self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, seconds: float) -> bool:
        """Wait until the job has ended, at most `seconds`; return whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.alive()

    def end(self, silent: float) -> int | None:
        """Return the exit code once no process is left; after `silent` seconds without
        output kill all, return None.
        """
        size, since = -1, time.monotonic()
        while not self.wait(0.2):
            if (now := self.log.stat().st_size) != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > silent:
                break
        code = self.process.poll()
        self.signal(signal.SIGKILL)
        self.process.wait()
        return code

    # ---- faults of storage ----

    @contextlib.contextmanager
    def fault(self, name: str, value: int = 1) -> Iterator[None]:
        """Hold a fault of FAULTS at `value` for the block."""
        self._set(name, value)
        try:
            yield
        finally:
            self._set(name, 0)

    def _set(self, name: str, value: int) -> None:
        with open(self.control, "r+b") as file:
            file.seek(8 * FAULTS.index(name))
            file.write(struct.pack("q", value))

    # ---- output ----

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def traceback(self) -> bool:
        """Return whether a rank ended with a traceback."""
        return TRACEBACK in OF_TORCHRUN.sub("", self.output())

    def first_step(self) -> bool:
        """Return whether a step has finished since the start."""
        return STEP_LINE.search(self.output()) is not None

    def wait_for_first_step(self, limit: float) -> float | None:
        """Return the seconds from the start to the first finished step; None if the
        job ends, or `limit` passes.
        """
        while time.monotonic() - self.started < limit:
            if self.first_step():
                return time.monotonic() - self.started
            if self.wait(0.05):
                return time.monotonic() - self.started if self.first_step() else None
        return None


def _is_trainer(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"train.py" in words and b"torch.distributed.run" not in words
    return False
