"""A full disk or a closed console ends no run; long work shows its progress."""

import errno
import os
import re
import threading

import pytest

from gpt2_triton import console
from gpt2_triton.console import LogFile, Progress, format_bytes, print_line, printable


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_log_file_that_is_gone_is_made_again_with_a_warning(tmp_path, capsys, how):
    path, made = tmp_path / "run" / "x.jsonl", []
    path.parent.mkdir()
    lines = LogFile(path, made_again=lambda: made.append(path.exists()))
    lines.write("1\n")
    if how == "moved":
        path.parent.rename(tmp_path / "elsewhere")
    else:
        path.unlink()
        path.write_text("") if how == "replaced" else path.parent.rmdir()
    lines.write("2\n")
    lines.write("3\n")
    lines.close()
    assert path.read_text() == "2\n3\n" and made == [True]
    warning = f"warning: {path}: was removed or moved while running; it is written again\n"
    assert capsys.readouterr().err == warning


class SmallDisk:
    """A raw file that takes `room` bytes."""

    def __init__(self, room):
        self.room, self.data, self.closed = room, b"", False

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = data[: self.room]
        self.room -= len(taken)
        self.data += taken
        return len(taken)

    def close(self):
        self.closed = True


@pytest.mark.timeout(60)
def test_log_file_replaced_by_a_pipe_is_not_waited_for(tmp_path, capsys):
    lines = LogFile(path := tmp_path / "x.jsonl")
    path.unlink()
    os.mkfifo(path)
    lines.write("first\n")
    assert "x.jsonl: cannot be written (x.jsonl is not a regular file): its lines wait" in capsys.readouterr().err
    path.unlink()
    lines.close()
    assert path.read_text() == "first\n"


def test_log_file_on_a_full_disk_keeps_lines_in_order(tmp_path, capsys):
    lines = LogFile(tmp_path / "x.jsonl")
    lines.write("first\n")
    assert (tmp_path / "x.jsonl").read_text() == "first\n"  # at once
    lines._file = disk = SmallDisk(room=3)
    for text in ("second\n", "third\n"):
        lines.write(text)
    assert disk.data == b"sec"
    disk.room = 100
    lines.write("fourth\n")
    lines.close()
    assert disk.data == b"second\nthird\nfourth\n" and disk.closed
    warning = f"warning: {tmp_path}/x.jsonl: cannot be written (No space left on device): its lines wait; make room\n"
    assert capsys.readouterr().err == warning


def test_log_file_reports_lost_lines_when_closed(tmp_path, capsys):
    lines = LogFile(tmp_path / "x.jsonl")
    lines._file = SmallDisk(room=3)
    lines.write("second\n")
    lines.close()
    assert capsys.readouterr().err.endswith("x.jsonl: its last 4 bytes could not be written\n")
    lines.close()  # as the end of a run does, after a rewind that closed it has failed
    assert not capsys.readouterr().err


def test_silent_console_prints_nothing_and_issues_warnings(capsys, monkeypatch):
    monkeypatch.setattr(console, "DELAY", 0)
    with console.silent():
        print_line("a step")
        with pytest.warns(UserWarning, match="^a.jsonl: damaged$"):
            print_line("warning: a.jsonl: damaged", error=True)
        with Progress("work", 2, "tokens") as progress:
            progress.advance(2)
        with console.silent(False):
            print_line("asked for")
    print_line("later")
    assert capsys.readouterr() == ("asked for\nlater\n", "")


class Console:
    """A terminal or file that fails with error `number` when it is flushed."""

    def __init__(self, number):
        self.number = number

    def write(self, text):
        return len(text)

    def flush(self):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EPIPE])
def test_print_line_drops_lines_of_a_broken_console(monkeypatch, number):
    monkeypatch.setattr("sys.stdout", Console(number))
    monkeypatch.setattr("sys.stderr", Console(number))
    print_line("a line")
    print_line("a warning", error=True)


class Stderr:
    """A terminal or a file that keeps what is written."""

    encoding = "utf-8"

    def __init__(self, terminal, error=None):
        self.text, self.terminal, self.error = "", terminal, error

    def isatty(self):
        return self.terminal

    def write(self, text):
        if self.error:
            raise self.error
        self.text += text
        return len(text)

    def flush(self):
        pass


def work(monkeypatch, stderr, seconds, total=4000, done=0):
    """Advance by 500 at each of these seconds; return what was displayed."""
    clock = iter([0.0, *seconds])
    monkeypatch.setattr("sys.stderr", stderr)
    with monkeypatch.context() as patch:
        patch.setattr("tqdm.std.time", lambda: next(clock, seconds[-1]))
        with Progress("work", total, "tokens", done) as progress:
            for i, _ in enumerate(seconds):
                progress._bar._time = lambda i=i: seconds[i]
                progress.advance(500, "loss 3.1")
    return stderr.text


def test_progress_that_is_not_on_a_terminal_shows_nothing(monkeypatch):
    assert work(monkeypatch, Stderr(terminal=False), [2.0, 10.0, 20.0]) == ""


def test_progress_rate_leaves_out_earlier_work(monkeypatch):
    text = work(monkeypatch, Stderr(terminal=True), [10.0], done=2000)
    assert re.match(r"\rwork:  62%\|.*2.50k/4.00k \[00:10<00:30, 50.0 tokens/s, loss 3.1\]", text)


def test_progress_without_a_total_has_no_time_left(monkeypatch):
    text = work(monkeypatch, Stderr(terminal=True), [10.0], total=None)
    assert text.startswith("\rwork: 500 tokens [00:10, 50.0 tokens/s, loss 3.1]")


def test_progress_learns_its_total_while_it_works(monkeypatch):
    stderr = Stderr(terminal=True)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(console, "DELAY", 0)
    with Progress("compiling", None, "kernels") as progress:
        monkeypatch.setattr(progress._bar, "mininterval", 0)
        for done in (1, 3):
            progress.show(done, 4)
    assert "compiling:  75%" in stderr.text and "3.00/4.00" in stderr.text


def test_progress_of_short_work_shows_nothing(monkeypatch):
    for terminal in (False, True):
        assert work(monkeypatch, Stderr(terminal), [1.0, 4.0, 4.9]) == ""


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    text = work(monkeypatch, Stderr(terminal=True), [2.0, 10.0])
    assert re.match(r"\rwork:  25%\|.*1.00k/4.00k \[00:10<00:30, 100 tokens/s, loss 3.1\]", text) and "\n" not in text


def test_progress_of_other_ranks_shows_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert work(monkeypatch, Stderr(terminal=True), [10.0, 20.0]) == ""


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "error", [OSError(errno.EPIPE, "broken pipe"), OSError(errno.ENOSPC, "full"), ValueError("I/O on closed file")]
)
def test_progress_on_a_broken_console_continues(monkeypatch, terminal, error):
    """And leaves no lock held, for which the bar of another thread would wait."""
    work(monkeypatch, Stderr(terminal, error), [10.0, 20.0])
    taken = []
    thread = threading.Thread(target=lambda: taken.append(console._Bar.get_lock().acquire(timeout=10)))
    thread.start()
    thread.join()
    assert taken == [True]
    console._Bar.set_lock(threading.RLock())  # that one has ended with its thread, held
    assert console.DELAY == 5.0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m, \x85, \x7f, \0", "\\x9b31m, \\x85, \\x7f, \\x00"),  # C1: terminals take \x9b for ESC [
        ("over\rwritten \b", "over\\rwritten \\x08"),
        ("a\ttab, a\nline, é, 猫, \N{NO-BREAK SPACE}", "a\ttab, a\nline, é, 猫, \N{NO-BREAK SPACE}"),
        ("a byte of a file's name: \udcff", "a byte of a file's name: \\udcff"),
    ],
)
def test_printable_escapes_control_characters(text, shown, capsys):
    assert printable(text) == shown
    print_line(text)
    print_line(text, error=True)
    assert capsys.readouterr() == (shown + "\n", shown + "\n")


def test_no_control_character_but_tab_and_newline_passes():
    every = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)]))
    assert {c for c in printable(every) if not c.isprintable()} == {"\t", "\n"}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 MiB"),
        (5_300_000, "5.1 MiB"),
        (2**30 - 1, "1,024.0 MiB"),
        (2**30, "1.00 GiB"),
        (150_000_000_000, "139.70 GiB"),
    ],
)
def test_format_bytes_has_digits_for_small_sizes(count, text):
    assert format_bytes(count) == text
