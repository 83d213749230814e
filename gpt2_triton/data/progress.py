"""Lines on stderr about long work: how much is done, how fast it goes, how long it will take."""

import os
import sys
import time
from datetime import timedelta

REPORT_SECONDS = 5.0


class Progress:
    """`advance` as the work goes on; a line every REPORT_SECONDS, none for work that is done sooner."""

    def __init__(self, what: str, total: int, unit: str):
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self.start = self.reported = time.monotonic()

    def advance(self, count: int) -> None:
        """`count` more of `total` units are done."""
        self.done += count
        now = time.monotonic()
        if now - self.reported >= REPORT_SECONDS and os.environ.get("RANK", "0") == "0":  # one rank speaks for all
            self.reported = now
            rate = self.done / (now - self.start)
            left = timedelta(seconds=round((self.total - self.done) / rate))
            done = f"{self.done:,} of {self.total:,} {self.unit}"
            print(f"{self.what}: {done}, {rate:,.0f} a second, {left} left", file=sys.stderr, flush=True)
