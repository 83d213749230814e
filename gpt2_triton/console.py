"""Lines for the console and for log files, the progress of long work, and the
names of commands in messages.

A full disk delays a log's lines; a console that cannot be written loses them.  Neither ends
a run.  Programs that import the package make the console silent: its warnings then go
through Python's `warnings`.
"""

import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

# C0 and C1 but tab and newline; surrogates
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
INTERVAL = 0.2  # seconds between two displays of progress
DELAY = 5.0  # seconds before the first display of progress: shorter work shows none

_is_silent = False


@contextlib.contextmanager
def silent(is_silent: bool = True) -> Iterator[None]:
    """Print neither lines nor progress in the context, in all threads; warnings
    are issued as UserWarning.
    """
    global _is_silent
    before, _is_silent = _is_silent, is_silent
    try:
        yield
    finally:
        _is_silent = before


def prepare_streams() -> None:
    """Open missing streams on /dev/null, and let both escape what they
    cannot encode; call it first.
    """
    sys.stdout, sys.stderr = (
        stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr)
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # in ASCII or Latin-1


def discard_unwritten() -> None:
    """Drop text that stdout and stderr refuse; otherwise Python flushes it again at
    exit, and exits with code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LogFile:
    """A log file, written line by line.  Lines that a full disk refuses wait, after a
    warning, for the next write.
    """

    def __init__(self, path: Path):
        self._path, self._waiting = path, b""
        self._file = open(path, "ab", buffering=0)

    def write(self, text: str) -> None:
        """Append the waiting lines, then `text`."""
        is_first = not self._waiting
        self._waiting += text.encode(errors="backslashreplace")  # a path may hold other bytes
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if is_first:
                print_line(
                    f"warning: {self._path}: cannot be written ({error.strerror}): its lines wait; "
                    "make room",
                    error=True,
                )

    def sync(self) -> None:
        """Return once the lines are on the disk, so that they survive a power cut; an
        error is left to `write`.
        """
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write the waiting lines; print a warning if that fails.  A
        second call does nothing.
        """
        if self._file.closed:
            return
        self.write("")
        if self._waiting:
            print_line(
                (
                    f"warning: {self._path}: its last {len(self._waiting):,} "
                    "bytes could not be written"
                ),
                error=True,
            )
        self._file.close()


def printable(text: str) -> str:
    """Return text that cannot command a terminal: control characters, but tab
    and newline, are escaped.
    """
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def command_line(command: str) -> str:
    """Return how the user calls a command here: "gpt2-triton plot", or
    "python -m gpt2_triton plot".
    """
    program = "gpt2-triton" if Path(sys.argv[0]).stem == "gpt2-triton" else "python -m gpt2_triton"
    return f"{program} {command}".rstrip()


def print_line(text: str, error: bool = False) -> None:
    """Print a line at once, to stderr if it is an error; a console that
    cannot be written loses it.
    """
    if _is_silent:
        if error:
            _warn(text.removeprefix("warning: "))
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed
        print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)


def _warn(text: str) -> None:
    """Issue a warning, which never ends a run: where a filter makes it an error, print it."""
    try:
        warnings.warn(text, stacklevel=3)
    except UserWarning:
        print(f"UserWarning: {text}", file=sys.stderr)


def print_from_handler(text: str) -> None:
    """Print a line from a signal handler, on rank 0 alone: `print` fails if it
    interrupts another `print`.
    """
    if not _is_silent and is_first_rank():
        newline = "\n" if os.isatty(1) else ""  # the terminal shows ^C at the beginning of the line
        with contextlib.suppress(OSError):
            os.write(1, f"{newline}{text}\n".encode())


def is_first_rank() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def format_bytes(count: float) -> str:
    """Return a size in GiB with two digits after the point, or below 1 GiB in MiB with one."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def format_count(count: float) -> str:
    """Return a count with three digits and a unit: 624k, 124M, 33.6B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def duration(seconds: float) -> str:
    """Format as 1h 23m, 4m 05s or 12s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours}h {m:02d}m"
    return f"{m}m {s:02d}s" if m else f"{s}s"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: 1 step, 2,000 steps."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


class Progress(tqdm):
    """Shows how much is done, the rate and the time left, from DELAY seconds on,
    on rank 0, on a terminal.
    """

    monitor_interval = 0  # no thread

    def __init__(self, what: str, total: int | None, unit: str, done: int = 0):
        """`total` is None if unknown; `done` units were done before and
        do not count for the rate.
        """
        shown = dict(desc=what, total=total, unit=f" {unit}", unit_scale=True, initial=done)
        when = dict(delay=DELAY, mininterval=INTERVAL, miniters=0, dynamic_ncols=True, leave=False)
        disable = _is_silent or not is_first_rank() or None  # None: unless stderr is a terminal
        # 0: the mean rate since the beginning
        super().__init__(**shown, **when, smoothing=0, disable=disable)

    def show(self, done: float, total: int, note: str = "") -> None:
        """Show that `done` of `total` units are done."""
        self.total = total
        self.advance(done - self.n, note)

    def advance(self, count: float, note: str = "") -> None:
        """Count `count` more units as done; `note`, such as a loss, is shown behind the figures."""
        self.set_postfix_str(note, refresh=False)
        self.update(count)
