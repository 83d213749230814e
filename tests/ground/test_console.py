"""A full disk or a closed console ends no run; long work shows its progress."""

import errno
import io
import os

import pytest

from gpt2_triton import console
from gpt2_triton.console import LogFile, Progress, counted, format_bytes, print_line, printable


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


def test_log_file_on_a_full_disk_keeps_lines_in_order(tmp_path, capsys):
    lines = LogFile(tmp_path / "x.jsonl")
    lines.write("from r\udce9sum\n")  # a path in latin-1
    assert (tmp_path / "x.jsonl").read_text() == "from r\\udce9sum\n"  # at once
    lines._file = disk = SmallDisk(room=3)
    for text in ("second\n", "third\n"):
        lines.write(text)
    assert disk.data == b"sec"
    disk.room = 100
    lines.write("fourth\n")
    lines.close()
    assert disk.data == b"second\nthird\nfourth\n" and disk.closed
    warning = (
        f"warning: {tmp_path}/x.jsonl: cannot be written (No space left on "
        "device): its lines wait; make room\n"
    )
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


class Stderr(io.StringIO):
    """A terminal or a file."""

    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize(("terminal", "rank", "delay", "shown"), [
    (True, "0", 0, True), (True, "0", 5, False), (False, "0", 0, False), (True, "1", 0, False),
])  # fmt: skip
def test_progress_is_shown_by_rank_0_of_long_work_on_a_terminal(
    monkeypatch, terminal, rank, delay, shown
):
    """Also of work that learns its total while it works."""
    monkeypatch.setattr("sys.stderr", stderr := Stderr(terminal))
    monkeypatch.setattr(console, "DELAY", delay)
    monkeypatch.setattr(console, "INTERVAL", 0)
    monkeypatch.setenv("RANK", rank)
    with Progress("compiling", None, "kernels") as progress:
        for done in (1, 3):
            progress.show(done, 4, "matmul")
    text = stderr.getvalue()
    assert (
        ("compiling:  75%" in text and "3.00/4.00" in text and "matmul" in text)
        == shown
        == bool(text)
    )


def test_printed_lines_have_no_control_characters(capsys):
    """C1 too: terminals take \\x9b for ESC [.  Surrogates stand for bytes of a file's name."""
    text = "\x1b]0;title\x07 \x9b31m \x7f over\rwritten \udcff a\ttab, a\nline, é, 猫"
    shown = r"\x1b]0;title\x07 \x9b31m \x7f over\rwritten \udcff " + "a\ttab, a\nline, é, 猫"
    assert printable(text) == shown
    print_line(text)
    print_line(text, error=True)
    assert capsys.readouterr() == (shown + "\n", shown + "\n")


def test_format_bytes_has_digits_for_small_sizes():
    assert [format_bytes(n) for n in (0, 5_300_000, 2**30)] == ["0.0 MiB", "5.1 MiB", "1.00 GiB"]


def test_a_count_of_one_has_a_noun_without_s():
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


def test_messages_name_commands_as_the_user_called_one(monkeypatch):
    for started, called in (
        ("/usr/bin/gpt2-triton", "gpt2-triton"),
        ("train.py", "python -m gpt2_triton"),
    ):
        monkeypatch.setattr("sys.argv", [started])
        assert console.command_line("plot") == f"{called} plot"
