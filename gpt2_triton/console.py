"""Lines for the console and for log files, which a full disk delays and does not end a run for."""

import contextlib
import sys
from pathlib import Path


class Lines:
    """A file that lines are appended to, each at once.

    What the disk refuses waits in memory, after one warning, and goes out before the next line that it takes.
    """

    def __init__(self, path: Path):
        self._path, self._file, self._waiting, self._refused = path, open(path, "ab", buffering=0), b"", False

    def write(self, text: str) -> None:
        self._waiting += text.encode()
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            self._refused = False
        except OSError as error:
            if not self._refused:
                print_line(
                    f"warning: {self._path}: cannot be written ({error.strerror}): its lines wait; make room",
                    error=True,
                )
            self._refused = True

    def close(self) -> None:
        self.write("")
        if self._waiting:
            print_line(f"warning: {self._path}: its last {len(self._waiting):,} bytes could not be written", error=True)
        self._file.close()


def print_line(text: str, error: bool = False) -> None:
    """Print a line at once, to stderr if it is an error.  A console that takes no more, as it is a file on a full disk,
    a terminal that was closed or a pipe that nobody reads, loses the line and not the run.
    """
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr if error else sys.stdout, flush=True)
