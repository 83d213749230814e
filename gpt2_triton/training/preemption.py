"""How a run ends before its last step: by a signal, or by the time limit train.max_minutes.

After the first signal of NUMBERS the run finishes its step, saves and ends: SIGINT, SIGTERM, SIGHUP
(a closed terminal), and what schedulers send before a limit.  Validation and samples that were due
after this step, and a validation under way, are left to the resumed run.  A second signal ends the
run at once.  Before the loop there is nothing to save, and Python's own handlers act.

Such a run leaves the file PREEMPTED in its directory, since launchers hide exit codes.  The next
start removes the file when its loop begins, or when it fails.

A signal may reach one rank only, or all ranks at slightly different times, and clocks differ.
A rank's request is therefore summed over ranks in the next step, as the loss is, and all
ranks stop after the same step.
"""

import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_triton.console import print_from_handler

PREEMPTED = "PREEMPTED"
# seconds in which a repeated signal is ignored: shells, SLURM and torchrun send one twice
REPEAT_WINDOW = 1
LAUNCHED_WINDOW = 5  # for several ranks, or under torchrun
TO_STOP = (signal.SIGINT, signal.SIGTERM)
NUMBERS = (*TO_STOP, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class ShutdownSignals:
    """Records this rank's signals from `begin_loop` on; `stop` is True when the run is to end."""

    def __init__(self, ranks: int):
        self.received = 0  # number of the signal that this rank received last
        self.time_is_up = False  # train.max_minutes on this rank
        self.all_ranks_agree = False  # the last finished step carried a rank's request to stop
        self.made_at = time.monotonic()
        self._ranks = ranks
        self._received_at = 0.0  # the time of the first signal
        is_launched = ranks > 1 or "TORCHELASTIC_RUN_ID" in os.environ
        self._window = LAUNCHED_WINDOW if is_launched else REPEAT_WINDOW
        self._replaced: dict[int, Any] = {}  # the program's own handlers, by signal

    def begin_loop(self, run_dir: Path) -> None:
        """Install the handlers, if this is the main thread.  What is ignored stays
        so, as SIGHUP under nohup.
        """
        self._run_dir = run_dir
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if number in TO_STOP or signal.getsignal(number) != signal.SIG_IGN:
                    self._replaced[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: Any) -> None:
        if not self.received:
            self._received_at = time.monotonic()
            again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
            print_from_handler(
                f"stopping after this step; {again} after {self._window} s "
                "ends at once without a checkpoint"
            )
        elif number != signal.SIGXCPU and time.monotonic() - self._received_at > self._window:
            self._leave(number)  # the system repeats SIGXCPU each second
        self.received = number

    def _leave(self, number: int) -> None:
        """End the process; a half-written checkpoint stays hidden."""
        mark_preempted(self._run_dir)
        print_from_handler(
            f"ended at once: steps since the last checkpoint are lost; {self.how_to_continue()}"
        )
        os._exit(128 + number)

    def how_to_continue(self) -> str:
        """Return the end of a message: what continues this run."""
        return (
            f"the same command with --run_dir {shlex.quote(str(self._run_dir))} --resume continues"
        )

    def is_requested(self) -> bool:
        """True when this rank has a reason to end the run."""
        return self.received > 0 or self.time_is_up

    @property
    def stop(self) -> bool:
        """True once all ranks agree to end the run."""
        return self.all_ranks_agree if self._ranks > 1 else self.is_requested()


class BorrowedSignals(ShutdownSignals):
    """The signals of a program that trains by a call.  When the `with` block ends, the program's
    handlers are put back and get the signal; Python's own makes SIGINT a KeyboardInterrupt.  A
    second signal goes to them at once.
    """

    def __enter__(self) -> "BorrowedSignals":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._put_back()
        if self.received and kind is None:
            signal.raise_signal(self.received)

    def how_to_continue(self) -> str:
        return "the same call with resume=True continues"

    def _put_back(self) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def _leave(self, number: int) -> None:
        self._put_back()
        signal.raise_signal(number)


def mark_preempted(run_dir: Path) -> None:
    """Leave PREEMPTED in the run directory, if the disk allows it."""
    with contextlib.suppress(OSError):
        (run_dir / PREEMPTED).touch()


@contextlib.contextmanager
def unmarked_by_errors(run_dir: Path) -> Iterator[None]:
    """Remove PREEMPTED if the block fails: a script that looks for the file would
    start the run again for ever.
    """
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):
            (run_dir / PREEMPTED).unlink()
        raise
