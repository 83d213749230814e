"""The built-in text, which any number of processes may prepare at once."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import threading
from pathlib import Path

from gpt2_triton.data.prepare import build
from gpt2_triton.data.prepare.builtin import builtin_shards, builtin_text, prepare_builtin
from tests.data.prepare.test_text import contents, text_of


def test_builtin_shards_hold_the_builtin_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = builtin_shards("bytes")
    text = builtin_text().encode()
    assert out == Path("data", f"builtin_bytes_{hashlib.sha256(text).hexdigest()[:8]}")
    assert text_of(out) == text
    assert len(text) > 300_000 and builtin_shards("bytes") == out


def test_builtin_waits_for_another_process_and_uses_its_shards(tmp_path, monkeypatch):
    out, first, lines, waiting = (
        tmp_path / "out",
        prepare_builtin(tmp_path / "first"),
        [],
        threading.Event(),
    )

    def print_line(line):
        lines.append(line)
        waiting.set()

    monkeypatch.setattr(build, "print_line", print_line)
    with build._locked(out):
        second = threading.Thread(target=prepare_builtin, args=(out,))
        second.start()
        assert waiting.wait(60) and lines == [f"waiting for another process that prepares {out}"]
        for path in first.iterdir():
            os.rename(path, out / path.name)
        before = {path.name: path.stat().st_ino for path in out.iterdir() if path.name != ".lock"}
    second.join()
    assert lines[1:] == [f"{out} is prepared already"]
    assert {path.name: path.stat().st_ino for path in out.iterdir()} == before


def test_builtin_begins_where_the_process_that_held_the_lock_failed(tmp_path):
    with build._locked(tmp_path / "out"):
        (tmp_path / "out" / "progress.json").write_text("{}")
    assert contents(prepare_builtin(tmp_path / "out")) == contents(
        prepare_builtin(tmp_path / "once")
    )


def test_builtin_by_several_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=prepare_builtin, args=(tmp_path / "out",)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == contents(prepare_builtin(tmp_path / "once"))


def test_builtin_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert (prepare_builtin(tmp_path / "out") / "shards.json").exists()
