"""Signals: after the first SIGINT, SIGTERM or SIGHUP (a closed terminal) the run finishes its step, saves and ends; the
second ends it at once.

A signal may reach one rank only, or all ranks at slightly different times.  Each rank's request therefore travels with
its next step's loss, so that all ranks stop after the same step.
"""

import os
import signal
import threading
import time
from typing import Any

REPEAT_WINDOW = 5  # seconds in which a signal counts as the same one: launchers forward what the process group also got


class ShutdownSignals:
    """Records the signals of this rank; `stop` is True when the run is to end."""

    def __init__(self, ranks: int):
        self.received = 0  # number of the signal that this rank received last
        self.all_ranks_agree = False  # some rank had received one before the last finished step began
        self._ranks, self._received_at = ranks, 0.0
        self._replaced: dict[int, Any] = {}  # the handlers before, by signal

    def listen(self) -> None:
        """Install the handlers, which only the main thread can.  SIGHUP stays ignored if it is, as under nohup."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._replaced.setdefault(number, signal.signal(number, self._handle))

    def _handle(self, number: int, _frame: Any) -> None:
        if self.received and (self._ranks == 1 or time.monotonic() - self._received_at > REPEAT_WINDOW):
            os._exit(128 + number)  # a half-written checkpoint stays hidden
        self.received, self._received_at = number, time.monotonic()

    @property
    def stop(self) -> bool:
        """True when the run is to end: on several ranks after a step whose result has informed all of them."""
        return self.all_ranks_agree if self._ranks > 1 else self.received > 0

    @property
    def exit_code(self) -> int:
        return 128 + (self.received or signal.SIGTERM)


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

    def _handle(self, number: int, frame: Any) -> None:
        if self.received:
            self._put_back()
            signal.raise_signal(number)
        else:
            super()._handle(number, frame)
