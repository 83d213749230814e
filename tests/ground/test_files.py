"""A crash leaves the old file or the new one; hidden files go with the process that wrote them."""

import hashlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_triton.errors import ConfigError
from gpt2_triton.files import (
    MARK,
    missing_space,
    new_directory,
    open_regular,
    process_mark,
    read_regular,
    remove,
    remove_abandoned,
    sha256,
    write_atomic,
)


def test_write_atomic_replaces_a_file(tmp_path):
    for parts in ((b"old",), (b"ne", memoryview(b"w"))):
        write_atomic(tmp_path / "x", *parts)
        assert (tmp_path / "x").read_bytes() == b"".join(parts) and os.listdir(tmp_path) == ["x"]
    assert sha256(tmp_path / "x") == hashlib.sha256(b"new").hexdigest()


def make_irregular(path, kind):
    """Make a pipe, a socket, a directory or a link to a device at `path`."""
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        dict(pipe=os.mkfifo, directory=os.mkdir, device=lambda path: path.symlink_to("/dev/zero"))[kind](path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "device"])
def test_open_regular_refuses_what_is_no_file_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    make_irregular(Path("x"), kind)
    with pytest.raises(OSError, match="x is not a regular file"):
        read_regular(Path("x"))
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match="Is a directory" if kind == "directory" else "x is not a regular file"):
            open_regular("x", flags)


def test_read_regular_refuses_more_than_it_may_read(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x") == read_regular(tmp_path / "x", most=5) == b"12345"
    with pytest.raises(OSError, match="x has more than 4 bytes"):
        read_regular(tmp_path / "x", most=4)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "device"])
def test_remove_takes_anything(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    make_irregular(Path("x"), kind)
    remove(Path("x"))
    assert os.listdir() == [] and os.path.exists("/dev/zero")


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_write_atomic_failure_keeps_the_old_file(tmp_path, monkeypatch, call):
    def fail(*_):
        raise OSError("no space")

    write_atomic(tmp_path / "x", b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no space"):
        write_atomic(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_new_directory_appears_at_the_end(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with new_directory(tmp_path / name) as directory:
            (directory / "x").write_bytes(b"1")
            assert not (tmp_path / name / "x").exists()
        assert (tmp_path / name / "x").read_bytes() == b"1"
    assert sorted(os.listdir(tmp_path)) == ["empty", "new"]


def test_new_directory_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "new") as directory:
        (directory / "x").write_bytes(b"1")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_new_directory_refuses_a_taken_place(tmp_path):
    (tmp_path / "x").touch()
    for taken in (tmp_path, tmp_path / "x"):
        with pytest.raises(ConfigError, match=f"{taken} is there already"), new_directory(taken):
            pass


def test_remove_abandoned_spares_running_processes(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    running = process_mark(), process_mark(os.getppid()), str(os.getppid())
    for mark in (f"{ended.pid}-1", str(ended.pid), *running):
        (tmp_path / f".x.{mark}.tmp").touch()
        (tmp_path / f".y.{mark}.tmp").mkdir()
    (tmp_path / "x.1.tmp").touch()
    hidden = re.compile(r"\..*\." + MARK + r"\.tmp")
    kept = {f".{name}.{mark}.tmp" for name in "xy" for mark in running} | {"x.1.tmp"}
    remove_abandoned(tmp_path, hidden)
    assert set(os.listdir(tmp_path)) == kept
    remove_abandoned(tmp_path, hidden, own=True)
    assert set(os.listdir(tmp_path)) == {name for name in kept if process_mark() not in name}


def test_remove_abandoned_knows_a_later_process_of_the_same_number(tmp_path):
    """In a container every first process is number 1."""
    later = process_mark(os.getppid())
    pid, start = later.split("-")
    for mark in (f"{pid}-{int(start) - 1}", later):
        (tmp_path / f".x.{mark}.tmp").touch()
    remove_abandoned(tmp_path, re.compile(r"\.x\." + MARK + r"\.tmp"))
    assert os.listdir(tmp_path) == [f".x.{later}.tmp"]


def test_write_atomic_and_new_directory_name_their_process(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "rename", lambda source, target: seen.append(Path(source).name))
    write_atomic(tmp_path / "x", b"")
    with new_directory(tmp_path / "y"):
        pass
    assert re.fullmatch(r"\.x\.[0-9a-f]{8}\." + MARK + r"\.tmp", seen[0])[1] == process_mark()
    assert seen[1] == f".y.tmp-{process_mark()}"


def test_missing_space_of_a_directory_to_be(tmp_path):
    assert missing_space(tmp_path / "a" / "b", 1) is None
    needed, free = missing_space(tmp_path / "a" / "b", 1 << 62)
    assert needed == 1 << 62 and 0 < free < needed
