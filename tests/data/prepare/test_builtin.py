"""The built-in text, which any number of processes may prepare at once."""

import hashlib
import multiprocessing
import os
import threading

import numpy as np

from gpt2_triton.data.prepare import pipeline, shard_writer
from gpt2_triton.data.prepare.builtin import builtin_shards, builtin_text, prepare_builtin
from tests.data.prepare.test_text import contents, tokens_of


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
    assert lines == [f"waiting for another process that prepares {hidden}", f"prepared {out}: 2 shards"]
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


def test_builtin_by_several_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=prepare_builtin, args=(tmp_path / "out",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and os.listdir(tmp_path) == ["out"]
    assert contents(tmp_path / "out") == contents(prepare_builtin(tmp_path / "once"))
