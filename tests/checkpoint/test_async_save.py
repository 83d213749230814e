"""Saving while training continues: the bytes of the call are written,
and a full disk ends no run.
"""

import itertools
import os
import resource
import shutil
import threading
from types import SimpleNamespace

import pytest

from gpt2_triton.checkpoint import save
from gpt2_triton.checkpoint.async_save import AsyncCheckpointer
from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.checkpoint.save import FILES_BYTES, Retention
from gpt2_triton.errors import CheckpointError
from tests.support.checkpoints import (
    STEP_10,
    STEP_20,
    STEP_30,
    content,
    example,
    load_checkpoint,
    names,
    state,
)


def pieces(step, n=33):
    """Return a shard as the trainer passes it: every tensor in pieces, here of
    30 elements and the rest.
    """
    return {name: [tensor[:30], tensor[30:]] for name, tensor in example(step, n).items()}


def test_save_copies_before_it_returns(tmp_path):
    saver, given = AsyncCheckpointer(tmp_path, Retention(0)), pieces(10)
    saver.save(10, given, {})
    for tensor in given.values():
        for piece in tensor:
            piece.fill_(1)
    saver.wait(raise_errors=True)
    assert content(load_checkpoint(tmp_path / STEP_10)[1]) == content(example(10))


def test_save_calls_before_it_writes(tmp_path):
    """Lines of the metrics up to a step have to be on the disk before its checkpoint is."""
    seen, saver = [], AsyncCheckpointer(tmp_path, Retention(0))
    saver.save(10, pieces(10), {}, before=lambda: seen.append([*tmp_path.iterdir()]))
    saver.wait(raise_errors=True)
    assert seen == [[]] and [*tmp_path.iterdir()]


def test_save_returns_while_writing_and_the_next_save_waits(tmp_path, monkeypatch):
    reached, proceed, rename = threading.Event(), threading.Event(), os.rename

    def held(source, target):
        reached.set()
        assert proceed.wait(60)
        rename(source, target)

    monkeypatch.setattr(os, "rename", held)
    saver = AsyncCheckpointer(tmp_path, Retention(0))
    saver.save(10, pieces(10), {})
    assert reached.wait(60) and not (tmp_path / STEP_10).exists()
    threading.Timer(0.2, proceed.set).start()
    saver.save(20, pieces(20), {})
    assert (tmp_path / STEP_10).exists()
    saver.wait(raise_errors=True)
    assert names(tmp_path) == [STEP_10, STEP_20]


def test_a_long_wait_for_the_disk_is_said_once(tmp_path, monkeypatch, capsys):
    moments = itertools.count(0, 12)
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    saver = AsyncCheckpointer(tmp_path, Retention(0))
    saver.save(10, pieces(10), {})
    saver.wait(raise_errors=True)  # as at the end of a run
    for step in (20, 30, 40):
        saver.save(step, pieces(step), {})
    saver.wait()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("waited")]
    assert said == [
        "waited 12 s for the save of step 20; if this repeats, "
        "raise checkpoint.every or take a faster disk"
    ]


@pytest.mark.parametrize(
    ("n", "text"), [(1 << 15, ""), (33, "x" * (1 << 15))], ids=["tensors", "state"]
)
def test_full_disk_is_a_warning_and_the_next_save_succeeds(newest, capsys, n, text):
    """A limit of 16 KiB per file fails as a full disk does, with EFBIG instead of ENOSPC."""
    saver, limits = (
        AsyncCheckpointer(newest.parent, Retention(1)),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        saver.save(30, pieces(30, n), {"text": text})
        saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [warning] = capsys.readouterr().err.splitlines()
    assert (
        warning.startswith(f"warning: {newest.parent / STEP_30} could not be written (")
        and "27" in warning
    )
    assert warning.endswith("make room, or make the directory writable")
    assert names(newest.parent) == [STEP_10, STEP_20] and find_checkpoint(newest.parent) == newest
    saver.save(30, pieces(30, n), {"text": text})
    saver.wait(raise_errors=True)
    assert names(newest.parent) == [STEP_30] and capsys.readouterr().err == ""


def test_save_without_space_warns_before_it_writes(newest, monkeypatch, capsys):
    """Older checkpoints stay, and the warning has the bytes needed and free."""
    needed = sum(t.nbytes for t in example(30).values()) + FILES_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    saver = AsyncCheckpointer(newest.parent, Retention(0))
    monkeypatch.setattr(save, "save_file", lambda *arguments: pytest.fail("it began to write"))
    saver.save(30, pieces(30), {})
    saver.wait()
    [warning] = capsys.readouterr().err.splitlines()
    assert f"{needed:,} bytes needed, 1,000 free" in warning
    assert warning.endswith("make room, or make the directory writable")
    assert names(newest.parent) == [STEP_10, STEP_20]


def test_wait_raises_the_error_of_a_failed_save_on_request(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    saver = AsyncCheckpointer(tmp_path / "checkpoints", Retention(1))
    saver.save(10, pieces(10), {})
    message = (
        r"could not be written .*Not a directory[^;]*; "
        r"make room, or make the directory writable, and resume$"
    )
    with pytest.raises(CheckpointError, match=message):
        saver.wait(raise_errors=True)


def test_wait_raises_bugs_of_the_thread(tmp_path):
    saver = AsyncCheckpointer(tmp_path, Retention(1))
    saver.save(10, pieces(10), {"a set": {1}})
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.wait()
    assert names(tmp_path) == []


def test_failed_step_is_that_of_the_last_wait(tmp_path, monkeypatch, capsys):
    saver = AsyncCheckpointer(tmp_path, Retention(0))
    with monkeypatch.context() as patch:
        patch.setattr(save, "free_space", lambda _: 0)
        saver.save(20, pieces(20), {})
        saver.wait()
        assert saver.failed_step == 20 and "could not be written" in capsys.readouterr().err
    saver.wait()
    assert saver.failed_step is None
    saver.save(20, pieces(20), {})
    saver.wait()
    assert saver.failed_step is None and names(tmp_path) == [STEP_20]


def test_state_that_was_saved_last_is_not_written_again(tmp_path):
    """As a signal in the last step asks for; a save that failed is repeated."""
    saver, written = AsyncCheckpointer(tmp_path, Retention(0)), []
    for sample in (1, 1, 2):
        saver.save(10, pieces(10), state(10, sample=sample))
        saver.wait(raise_errors=True)
        written.append((tmp_path / STEP_10).stat().st_ino)
    assert written[0] == written[1] != written[2]
