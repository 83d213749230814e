"""Lines on a full disk: none is lost that it takes later, and nothing is raised."""

import errno
import os

import pytest

from gpt2_triton.console import Lines, print_line


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


def test_lines_wait_for_room_and_keep_their_order(tmp_path, capsys):
    lines = Lines(tmp_path / "x.jsonl")
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


def test_what_was_never_taken_is_told_at_the_end(tmp_path, capsys):
    lines = Lines(tmp_path / "x.jsonl")
    lines._file = SmallDisk(room=3)
    lines.write("second\n")
    lines.close()
    assert capsys.readouterr().err.endswith("x.jsonl: its last 4 bytes could not be written\n")


class Console:
    """A terminal or file that fails with error `number` when it is flushed."""

    def __init__(self, number):
        self.number = number

    def write(self, text):
        return len(text)

    def flush(self):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EPIPE])
def test_a_console_that_is_full_or_gone_loses_lines_and_not_the_run(monkeypatch, number):
    monkeypatch.setattr("sys.stdout", Console(number))
    monkeypatch.setattr("sys.stderr", Console(number))
    print_line("a line")
    print_line("a warning", error=True)
