"""The first SIGINT, SIGTERM or SIGHUP (a terminal that is closed) lets a run finish its step, save and leave,
the second ends it at once.

Of several ranks one may be signalled alone, or all of them by a launcher, at about the same time.  What a rank has
heard travels with its next step's loss, so that all stop after the same step.
"""

import os
import signal
import time
from typing import Any

ECHO = 5  # seconds in which a signal that comes again is the same one: launchers pass on what a whole group got


class ShutdownSignals:
    """What this rank has heard, and whether the ranks stop."""

    def __init__(self, ranks: int):
        self.heard = 0  # the number of the signal
        self.agreed = False  # some rank had heard one before the last finished step began
        self._ranks, self._moment = ranks, 0.0

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: Any) -> None:
        if self.heard and (self._ranks == 1 or time.monotonic() - self._moment > ECHO):
            os._exit(128 + number)  # half a checkpoint stays hidden
        self.heard, self._moment = number, time.monotonic()

    @property
    def stop(self) -> bool:
        """Of several ranks only what they know alike."""
        return self.agreed if self._ranks > 1 else self.heard > 0

    @property
    def exit_code(self) -> int:
        return 128 + (self.heard or signal.SIGTERM)
