"""Lines for the console and for log files, and the progress of long work.

A full disk delays a log's lines; a console that cannot be written loses them.  Neither ends a run.
"""

import contextlib
import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from gpt2_triton.errors import ClosedOutputError

SURROGATES = re.compile("[\ud800-\udfff]")
DELAY = 5.0  # seconds before the first display of progress: shorter work shows none
REPORT_SECONDS = 5.0  # between two lines where stderr is not a terminal


def prepare_streams() -> None:
    """Make stdin, stdout and stderr exist and take any text; to be called first.

    A number that a shell has closed (`>&-`) would go to the next file that is opened, and a console in ASCII or Latin-1
    would refuse other characters.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if type(old := sys.stdout) is io.TextIOWrapper:
        encoding, line_buffering = old.encoding, old.line_buffering
        sys.stdout = _Stdout(old.detach(), encoding, "backslashreplace", line_buffering=line_buffering)
        sys.__stdout__ = sys.stdout  # type: ignore[misc]


class _Stdout(io.TextIOWrapper):
    """Stdout, whose errors differ from those of other files."""

    def write(self, text: str) -> int:
        with _as_closed_output():
            return super().write(text)

    def flush(self) -> None:
        with _as_closed_output():
            super().flush()


@contextlib.contextmanager
def _as_closed_output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ClosedOutputError("stdout was closed or full before all output was written") from error


def discard_unwritten() -> None:
    """Drop what stdout and stderr do not take, or the interpreter's flush at its exit fails with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def valid_unicode(text: str) -> str:
    """Return the text with U+FFFD for bytes of a command line or a path that are not UTF-8."""
    return SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)


class LogFile:
    """A file that lines are appended to, each at once.

    Lines that the disk refuses wait in memory, after one warning; they are written before the next line it accepts.
    """

    def __init__(self, path: Path):
        self._path, self._file, self._waiting, self._refused = path, open(path, "ab", buffering=0), b"", False

    def write(self, text: str) -> None:
        """Append `text`, and before it whatever is waiting."""
        self._waiting += text.encode(errors="backslashreplace")
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
        """Try once more to write what is waiting; print a warning if that fails."""
        self.write("")
        if self._waiting:
            print_line(f"warning: {self._path}: its last {len(self._waiting):,} bytes could not be written", error=True)
        self._file.close()


def print_line(text: str, error: bool = False) -> None:
    """Print a line at once, to stderr if it is an error.

    If the console cannot be written (full disk, closed terminal, broken pipe), drop the line and continue.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed, or another encoding
        print(text, file=sys.stderr if error else sys.stdout, flush=True)


class Progress:
    """Shows how much of some work is done, its rate and the time left, on stderr of rank 0, from DELAY seconds on.

    On a terminal it is tqdm's bar; elsewhere tqdm's figures as a line every REPORT_SECONDS.

        with Progress("perplexity", total, "tokens") as progress:
            progress.advance(count)
    """

    def __init__(self, what: str, total: int | None, unit: str, done: int = 0):
        """`total` is None if it is not known; `done` units were done before, and do not count for the rate."""
        self._bar = _Bar(
            desc=what,
            total=total,
            unit=f" {unit}",
            unit_scale=True,
            initial=done,
            delay=DELAY,
            mininterval=0.2 if _is_terminal() else REPORT_SECONDS,
            miniters=0,
            smoothing=0,  # the mean rate since the beginning
            dynamic_ncols=True,
            leave=False,
            file=sys.stderr,
            disable=os.environ.get("RANK", "0") != "0",
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: stderr is closed
            self._bar.close()

    def advance(self, count: int, note: str = "") -> None:
        """Count `count` more units as done; `note`, such as a loss, is shown behind the figures."""
        with contextlib.suppress(OSError, ValueError):
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)


class _Bar(tqdm):
    _lock = threading.RLock()  # tqdm's own is a semaphore of the system, for bars of several processes
    monitor_interval = 0  # no thread

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if _is_terminal():
            super().display(msg, pos)
        elif msg is None:  # "" clears a bar
            print_line(tqdm.format_meter(**self.format_dict | {"ncols": 0}), error=True)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except ValueError:  # closed
        return False
