"""Signals: after the first SIGINT, SIGTERM or SIGHUP (a closed terminal) the run finishes its step, saves and ends; the
second ends it at once.

A signal may reach one rank only, or all ranks at slightly different times.  Each rank's request therefore travels with
its next step's loss, so that all ranks stop after the same step.
"""

import os
import signal
import time
from typing import Any

REPEAT_WINDOW = 5  # seconds in which a signal counts as the same one: launchers forward what the process group also got


class ShutdownSignals:
    """Records the signals of this rank; `stop` is True when the run is to end."""

    def __init__(self, ranks: int):
        self.received = 0  # number of the signal that this rank received last
        self.all_ranks_agree = False  # some rank had received one before the last finished step began
        self._ranks, self._received_at = ranks, 0.0

    def listen(self) -> None:
        """Install the handlers.  SIGHUP stays ignored if it is, as under nohup."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

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
