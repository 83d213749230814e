"""Ends of a run before its last step: signals, and the time limit train.max_minutes.

After the first SIGINT, SIGTERM or SIGHUP (a closed terminal) the run finishes its step, saves and ends, and a resumed
run validates and samples as was due.  The second ends it at once, as does one before the first step, when there is
nothing to save.

Each leaves the file PREEMPTED in the run directory, since launchers hide exit codes.  Before rank 0 has locked the
directory, only rank 0 makes that file, and only if no other process writes there.  The first step of a start removes
the file of an earlier start.

A signal may reach one rank only, or all ranks at slightly different times, and clocks differ.  Each rank's request
therefore travels with its next step's loss, so that all ranks stop after the same step.
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

from gpt2_triton.console import print_from_handler, print_line
from gpt2_triton.distributed.run_lock import other_writer

PREEMPTED = "PREEMPTED"  # a file in the run directory of a run that ended before its last step and can be continued
# seconds in which a signal counts as the same one: shells and launchers forward what the process group also got
REPEAT_WINDOW = 1
LAUNCHED_WINDOW = 5  # of ranks, or of a process that torchrun started
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ShutdownSignals:
    """Records the signals of this rank; `stop` is True when the run is to end."""

    def __init__(self, ranks: int):
        self.received = 0  # number of the signal that this rank received last
        self.time_is_up = False  # train.max_minutes on this rank
        self.all_ranks_agree = False  # some rank had requested the end before the last finished step began
        self.run_dir: Path | None = None  # for PREEMPTED: on rank 0 from the start, on others once rank 0 has locked it
        self.is_locked = False  # run_dir, by rank 0 of this start
        self.made_at = time.monotonic()
        self._ranks, self._received_at = ranks, 0.0  # the time of the first signal
        self._window = LAUNCHED_WINDOW if ranks > 1 or "TORCHELASTIC_RUN_ID" in os.environ else REPEAT_WINDOW
        self._replaced: dict[int, Any] = {}  # the handlers before, by signal
        self._leaves_at_once = False
        self._leaving = threading.Lock()  # held from the decision to leave at once until the process ends

    def listen(self) -> None:
        """Install the handlers, which only the main thread can.  SIGHUP stays ignored if it is, as under nohup."""
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._replaced.setdefault(number, signal.signal(number, self._handle))

    @contextlib.contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """Install the handlers inside; until `begin_loop`, a signal ends the process.  Only the main thread can.

        Another thread ends it, because the main thread runs no handler while it waits in C, for ranks or a compiler.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in NUMBERS}
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._leaves_at_once = True
        self.listen()
        signal.set_wakeup_fd(write_end)
        threading.Thread(target=self._leave_on_signal, args=(read_end,), name="signals", daemon=True).start()
        try:
            yield
        finally:
            self._leaves_at_once = False
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            os.close(write_end)  # ends the thread

    def begin_loop(self) -> None:
        """From now on a signal ends the run after its step."""
        self.listen()
        with self._leaving:
            self._leaves_at_once = False

    def _leave_on_signal(self, pipe: int) -> None:
        while number := os.read(pipe, 1):
            with self._leaving:
                if self._leaves_at_once and number[0] in NUMBERS:
                    print_line("; ".join(["stopped before the first step", *self._mark()]))
                    os._exit(128 + number[0])
        os.close(pipe)

    def _handle(self, number: int, _frame: Any) -> None:
        if self.received and time.monotonic() - self._received_at > self._window:
            self._leave(number)  # a half-written checkpoint stays hidden
        if not self.received and not self._leaves_at_once:
            later = "1 second" if self._window == 1 else f"{self._window} seconds"
            again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
            print_from_handler(f"stopping after this step; {again} after {later} ends at once without a checkpoint")
        if not self.received:
            self._received_at = time.monotonic()
        self.received = number

    def _leave(self, number: int) -> None:
        print_from_handler("; ".join(["ended at once: steps since the last checkpoint are lost", *self._mark()]))
        os._exit(128 + number)

    def _mark(self) -> list[str]:
        """Leave PREEMPTED, unless another process writes to the run directory; return what follows from it."""
        if self.run_dir is None:
            return []
        try:
            if not self.is_locked and (other := other_writer(self.run_dir)):
                return [f"{other} to {self.run_dir}, where this start leaves no {PREEMPTED}"]
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / PREEMPTED).touch()
        except OSError as error:
            return [f"cannot make {self.run_dir / PREEMPTED}: {error.strerror}"]
        return [how_to_continue(self.run_dir)]

    @property
    def requested(self) -> bool:
        """True when this rank has a reason to end the run."""
        return self.received > 0 or self.time_is_up

    @property
    def stop(self) -> bool:
        """True when the run is to end: on several ranks after a step whose result has informed all of them."""
        return self.all_ranks_agree if self._ranks > 1 else self.requested


class BorrowedSignals(ShutdownSignals):
    """The signals of a program that trains by a call.  When its `with` block ends, the program's own handlers are put
    back, and one receives the signal: KeyboardInterrupt for SIGINT, unless the program handles it.  A second signal
    goes to them at once.
    """

    def __enter__(self) -> "BorrowedSignals":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._put_back()
        if self.received and kind is None:
            signal.raise_signal(self.received)

    def _put_back(self) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def _leave(self, number: int) -> None:
        self._put_back()
        signal.raise_signal(number)


class TimeLimit:
    """train.max_minutes: is_near() while there is still time to finish a step and to save."""

    def __init__(self, minutes: float, began: float):
        """`began`: time.monotonic() at which the minutes begin; 0 minutes are no limit."""
        self._end = began + 60 * minutes if minutes else None
        self._lap_began, self._longest = time.monotonic(), 0.0

    def is_near(self, saving: float) -> bool:
        """Return True if the time that is left may not suffice for another step than those under way; to be called
        once a step.

        `saving`: seconds that a save takes.  The run may have to wait for the save before, and for two of its longest
        steps, with what comes between steps: the request travels with the next step, whose result is read one later.
        """
        now = time.monotonic()
        self._longest, self._lap_began = max(self._longest, now - self._lap_began), now
        return self._end is not None and now + 2 * self._longest + 2 * saving > self._end


def mark_preempted(run_dir: Path) -> None:
    """Leave PREEMPTED in the run directory, unless that cannot be written."""
    with contextlib.suppress(OSError):
        (run_dir / PREEMPTED).touch()


def how_to_continue(run_dir: Path) -> str:
    return f"the same command with --run_dir {shlex.quote(str(run_dir))} --resume continues"
