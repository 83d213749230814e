"""Lines for the console and for log files, the progress of long work, and the names of commands in messages.

A full disk delays a log's lines; a console that cannot be written loses them.  Neither ends a run.  Programs that
import the package make the console silent: its warnings then go through Python's `warnings`.
"""

import contextlib
import io
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from gpt2_triton.errors import ClosedOutputError
from gpt2_triton.files import open_regular

SURROGATES = re.compile("[\ud800-\udfff]")
DELAY = 5.0  # seconds before the first display of progress: shorter work shows none
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # C0 and C1 but tab and newline; surrogates
INTERVAL = 0.2  # seconds between two displays

_is_silent = False


@contextlib.contextmanager
def silent(is_silent: bool = True) -> Iterator[None]:
    """Print neither lines nor progress in the context, in all threads; warnings are issued as UserWarning."""
    global _is_silent
    before, _is_silent = _is_silent, is_silent
    try:
        yield
    finally:
        _is_silent = before


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
    except BrokenPipeError as error:
        raise ClosedOutputError("") from error  # the reader, such as head, has all that it wants
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

    Lines that cannot be written wait in memory, after one warning; the next write that succeeds writes them first.
    A file that was removed or moved is made again, after a warning.
    """

    def __init__(self, path: Path, made_again: Callable[[], None] = lambda: None):
        """`made_again` is called when the file was made again, in a new directory if that was removed too."""
        self._path, self._waiting, self._refused, self._made_again = path, b"", False, made_again
        self._open()

    def _open(self) -> None:
        self._file = open(self._path, "ab", buffering=0, opener=open_regular)
        self._stat = os.fstat(self._file.fileno())

    def write(self, text: str) -> None:
        """Append `text`, and before it whatever is waiting."""
        self._waiting += text.encode(errors="backslashreplace")
        try:
            if self._is_gone():
                self._make_again()
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

    def _is_gone(self) -> bool:
        try:
            return not os.path.samestat(self._stat, os.stat(self._path))
        except FileNotFoundError:
            return True

    def _make_again(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        before = self._file
        self._open()
        before.close()
        print_line(f"warning: {self._path}: was removed or moved while running; it is written again", error=True)
        self._made_again()

    def sync(self) -> None:
        """Return once the lines are on the disk, so that they survive a power cut; an error is left to `write`."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write what is waiting; print a warning if that fails.  A second call does nothing."""
        if self._file.closed:
            return
        self.write("")
        if self._waiting:
            print_line(f"warning: {self._path}: its last {len(self._waiting):,} bytes could not be written", error=True)
        self._file.close()


def printable(text: str) -> str:
    """Return text that cannot command a terminal: control characters but tab and newline as \\x1b, as in Python.

    Messages about a file's name or content go through here, since anything may be in them; so does sampled text that
    goes to a terminal.  Surrogates, which stand for bytes in file names that are not UTF-8, could not be printed.
    """
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def command_line(command: str) -> str:
    """Return how to call a command of this package here: "gpt2-triton plot" if the user has called gpt2-triton, else
    "python -m gpt2_triton plot", which needs no script on the path.
    """
    program = "gpt2-triton" if Path(sys.argv[0]).stem == "gpt2-triton" else "python -m gpt2_triton"
    return f"{program} {command}".rstrip()


def print_line(text: str, error: bool = False) -> None:
    """Print a line at once, to stderr if it is an error, with control characters escaped.

    If the console cannot be written (full disk, closed terminal, broken pipe), drop the line and continue.
    """
    if _is_silent:
        if error:
            warnings.warn(text.removeprefix("warning: "), stacklevel=2)
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed, or another encoding
        print(printable(text), file=sys.stderr if error else sys.stdout, flush=True)


def print_from_handler(text: str) -> None:
    """Print a line from a signal handler, on rank 0 alone: `print` fails if the signal interrupts another one."""
    if not _is_silent and _is_first_rank():
        newline = "\n" if os.isatty(1) else ""  # the terminal shows ^C at the beginning of the line
        with contextlib.suppress(OSError):
            os.write(1, f"{newline}{text}\n".encode())


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def format_bytes(count: float) -> str:
    """Return a size in GiB with two digits after the point, or below 1 GiB in MiB with one."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


class Progress:
    """Shows how much of some work is done, its rate and the time left, as tqdm's bar, from DELAY seconds on.

    Only rank 0 shows it, and only if stderr is a terminal: a log file gets no lines.

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
            mininterval=INTERVAL,
            miniters=0,
            smoothing=0,  # the mean rate since the beginning
            dynamic_ncols=True,
            leave=False,
            file=sys.stderr,
            disable=_is_silent or not _is_first_rank() or not is_terminal(),
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: stderr is closed
            self._bar.close()

    def show(self, done: float, total: int, note: str = "") -> None:
        """Show that `done` of `total` units are done."""
        self._bar.total = total
        self.advance(done - self._bar.n, note)

    def advance(self, count: float, note: str = "") -> None:
        """Count `count` more units as done; `note`, such as a loss, is shown behind the figures."""
        with contextlib.suppress(OSError, ValueError):
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)


class _Bar(tqdm):
    _lock = threading.RLock()  # tqdm's own is a semaphore of the system, for bars of several processes
    monitor_interval = 0  # no thread

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, unless the terminal is gone: an error that left tqdm's `refresh` would leave the lock held, and
        the next bar of another thread would wait for ever.
        """
        with contextlib.suppress(OSError, ValueError):
            return bool(super().display(msg, pos))
        return False


def is_terminal(stream: TextIO | None = None) -> bool:
    """Return whether the stream, by default stderr, is a terminal."""
    try:
        return (stream or sys.stderr).isatty()
    except ValueError:  # closed
        return False
