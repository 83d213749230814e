"""The built-in text, which any number of processes may prepare at once."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from gpt2_triton.data.prepare import pipeline, shard_writer
from gpt2_triton.data.prepare.builtin import builtin_shards, builtin_text, prepare_builtin
from gpt2_triton.errors import DataError
from tests.data.prepare.test_text import contents, tokens_of


def prepared(out):
    """Return the line that ends a preparation of two shards."""
    train, val = (len(tokens_of(out, split)) for split in ("train", "val"))
    return f"prepared {out}: 2 shards, {train:,} tokens to train on, {val:,} tokens for validation"


def test_builtin_shards_hold_the_builtin_text(tmp_path):
    out = builtin_shards("bytes", tmp_path / "data")
    text = builtin_text().encode()
    assert out.parent == tmp_path / "data" and out.name == f"builtin_bytes_{hashlib.sha256(text).hexdigest()[:8]}"
    assert bytes(np.concatenate([tokens_of(out, s) for s in ("train", "val")]).astype(np.uint8)) == text
    assert len(text) > 300_000 and builtin_shards("bytes", tmp_path / "data") == out


def test_builtin_waits_for_another_process_and_uses_its_shards(tmp_path):
    out, lines = tmp_path / "out", []
    with pipeline.locked(tmp_path / ".out.partial", print):
        second = threading.Thread(target=prepare_builtin, args=(out, "bytes", lines.append))
        second.start()
        second.join(0.3)
        assert second.is_alive() and lines == [f"waiting for another process that prepares {tmp_path}/.out.partial"]
        first = prepare_builtin(tmp_path / "first")
        os.rename(first, out)
        before = {p.name: p.stat().st_ino for p in out.iterdir()}
    second.join()
    assert {p.name: p.stat().st_ino for p in out.iterdir()} == before and lines[1:] == [f"{out} is prepared already"]
    assert os.listdir(tmp_path) == ["out"]


def test_builtin_builds_in_a_directory_that_the_first_process_has_removed(tmp_path):
    """A process that finds its text changed removes what it has built, for which another may be waiting."""
    out, hidden, waiting, lines = tmp_path / "out", tmp_path / ".out.partial", threading.Event(), []

    def log(line):
        lines.append(line)
        waiting.set()

    with pipeline.locked(hidden, print):
        second = threading.Thread(target=prepare_builtin, args=(out, "bytes", log))
        second.start()
        assert waiting.wait(60)
        hidden.rmdir()
    second.join()
    assert lines == [f"waiting for another process that prepares {hidden}", prepared(out)]
    assert os.listdir(tmp_path) == ["out"]


def test_builtin_put_in_place_during_the_check_is_used(tmp_path, monkeypatch):
    """Another process renames its shards just after this one has looked for a record."""
    out, lines, is_done = tmp_path / "out", [], shard_writer.is_done

    def is_done_before_the_rename(directory, recipe):
        monkeypatch.undo()
        done = is_done(directory, recipe)
        prepare_builtin(out)
        return done

    monkeypatch.setattr(shard_writer, "is_done", is_done_before_the_rename)
    assert prepare_builtin(out, log=lines.append) == out and lines == [f"{out} is prepared already"]
    assert os.listdir(tmp_path) == ["out"]


def _refuse_lock(handle, operation):
    raise OSError(errno.EBADF, "no lock of a directory")


@pytest.mark.parametrize("name", ["train_000000.bin", "val_000000.bin", "shards.json", "out"])
def test_builtin_without_locks_uses_what_another_process_put_there_first(tmp_path, monkeypatch, name):
    """The other one prepares all of it just before the named file, or the directory, is renamed into place."""
    rename, out, lines = os.rename, tmp_path / "out", []

    def prepare_then_rename(source, target):
        if Path(target).name == name:
            monkeypatch.setattr(os, "rename", rename)
            prepare_builtin(out)
        rename(source, target)

    monkeypatch.setattr(fcntl, "flock", _refuse_lock)
    monkeypatch.setattr(os, "rename", prepare_then_rename)
    assert prepare_builtin(out, log=lines.append) == out and lines == [prepared(out)]
    assert os.listdir(tmp_path) == ["out"] and os.stat(out).st_mode & 0o777 == 0o755
    monkeypatch.undo()
    assert contents(out) == contents(prepare_builtin(tmp_path / "once"))


def test_builtin_without_locks_refuses_what_else_was_put_there(tmp_path, monkeypatch):
    rename, out = os.rename, tmp_path / "out"

    def write_then_rename(source, target):
        if target == out:
            out.mkdir()
            (out / "other.bin").touch()
        rename(source, target)

    monkeypatch.setattr(fcntl, "flock", _refuse_lock)
    monkeypatch.setattr(os, "rename", write_then_rename)
    with pytest.raises(DataError, match="out: in use: got other.bin, expected .* choose another directory"):
        prepare_builtin(out)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(out) == ["other.bin"]


def _prepare_without_locks(out, barrier):
    """All processes have built their shards when the first of them is put in place."""
    rename, fcntl.flock = os.rename, _refuse_lock

    def rename_together(source, target):
        if target == out:
            barrier.wait(120)
        rename(source, target)

    os.rename = rename_together
    prepare_builtin(out)


def test_builtin_by_several_processes_at_once_without_locks(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    processes = [context.Process(target=_prepare_without_locks, args=(tmp_path / "out", barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and os.listdir(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == contents(prepare_builtin(tmp_path / "once"))


def test_builtin_by_several_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=prepare_builtin, args=(tmp_path / "out",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and os.listdir(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == contents(prepare_builtin(tmp_path / "once"))
