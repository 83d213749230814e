"""The promises of saving while a run goes on: what is written is what was there; a full disk ends no run."""

import errno
import os
import resource
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from gpt2_triton.checkpoint import save
from gpt2_triton.checkpoint.async_save import AsyncCheckpointer
from gpt2_triton.checkpoint.load import find_checkpoint, load_checkpoint
from gpt2_triton.checkpoint.save import FILES_BYTES
from gpt2_triton.errors import CheckpointError
from tests.support.checkpoints import STEP_10, STEP_20, STEP_30, content, example, names


def share(step, n=33):
    """What GPT2.share gives: every tensor in parts, here of 30 elements and the rest."""
    return {name: [tensor[:30], tensor[30:]] for name, tensor in example(step, n).items()}


def test_what_is_submitted_may_change_at_once(tmp_path):
    saver, given = AsyncCheckpointer(tmp_path, keep=0, major=0), share(10)
    saver.submit(10, given, {})
    for parts in given.values():
        for part in parts:
            part.fill_(1)
    saver.wait(raise_errors=True)
    assert content(load_checkpoint(tmp_path / STEP_10)[1]) == content(example(10))


def test_what_was_submitted_last_is_recalled(tmp_path):
    saver, now = AsyncCheckpointer(tmp_path, keep=0, major=0), share(30)
    assert not saver.restore_from_host(10, now)
    for step in (10, 20):
        saver.submit(step, share(step), {})
    before = content({name: torch.cat(parts) for name, parts in now.items()})
    assert (
        not saver.restore_from_host(10, now)
        and content({name: torch.cat(parts) for name, parts in now.items()}) == before
    )
    assert saver.restore_from_host(20, now)
    assert content({name: torch.cat(parts) for name, parts in now.items()}) == content(example(20))


def test_submit_returns_while_writing_and_the_next_one_waits(tmp_path, monkeypatch):
    reached, go_on, rename = threading.Event(), threading.Event(), os.rename

    def held(source, target):
        reached.set()
        assert go_on.wait(60)
        rename(source, target)

    monkeypatch.setattr(os, "rename", held)
    saver = AsyncCheckpointer(tmp_path, keep=0, major=0)
    saver.submit(10, share(10), {})
    assert reached.wait(60) and not (tmp_path / STEP_10).exists()
    threading.Timer(0.2, go_on.set).start()
    saver.submit(20, share(20), {})
    assert (tmp_path / STEP_10).exists()
    saver.wait(raise_errors=True)
    assert names(tmp_path) == [STEP_10, STEP_20]


@pytest.mark.parametrize(("n", "text"), [(1 << 15, ""), (33, "x" * (1 << 15))], ids=["tensors", "state"])
def test_a_full_disk_is_a_warning_and_the_next_save_succeeds(newest, capsys, n, text):
    """No file may grow past 16 KiB, which fails as a full disk does, with EFBIG for ENOSPC."""
    saver, limits = AsyncCheckpointer(newest.parent, keep=1, major=0), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        saver.submit(30, share(30, n), {"text": text})
        saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {newest.parent}: a checkpoint could not be written (") and "27" in warning
    assert warning.endswith("; older ones stay; make it writable")
    assert names(newest.parent) == [STEP_10, STEP_20] and find_checkpoint(newest.parent) == newest
    saver.submit(30, share(30, n), {"text": text})
    saver.wait(raise_errors=True)
    assert names(newest.parent) == [STEP_30] and capsys.readouterr().err == ""


def test_a_save_begins_only_where_there_is_room(newest, monkeypatch, capsys):
    """The older ones stay, the run goes on with a warning that says how much is missing."""
    needed = sum(t.nbytes for t in example(30).values()) + FILES_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    saver = AsyncCheckpointer(newest.parent, keep=1, major=0)
    with monkeypatch.context() as patch:
        patch.setattr(save, "save_file", lambda *arguments: pytest.fail("it began to write"))
        saver.submit(30, share(30), {})
        saver.wait()
    [warning] = capsys.readouterr().err.splitlines()
    assert f"{needed:,} bytes needed, {needed - 1:,} free" in warning
    assert warning.endswith("; older ones stay; free some space")
    assert names(newest.parent) == [STEP_10, STEP_20]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    saver.submit(30, share(30), {})
    saver.wait(raise_errors=True)
    assert names(newest.parent) == [STEP_30]


def test_on_request_a_save_that_failed_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    saver = AsyncCheckpointer(tmp_path / "checkpoints", keep=1, major=0)
    saver.submit(10, share(10), {})
    with pytest.raises(CheckpointError, match=r"could not be written .*File exists[^;]*; make it writable and resume$"):
        saver.wait(raise_errors=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_filled_up_while_writing_is_told_by_its_text(tmp_path, monkeypatch, capsys, number):
    """safetensors gives no number; and there is no older checkpoint."""

    def full(*arguments):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    monkeypatch.setattr(save, "save_file", full)
    saver = AsyncCheckpointer(tmp_path / "checkpoints", keep=1, major=0)
    saver.submit(10, share(10), {})
    saver.wait()
    assert capsys.readouterr().err.endswith("); free some space\n")


def test_a_slip_of_ours_in_the_thread_is_raised_where_it_is_waited_for(tmp_path):
    saver = AsyncCheckpointer(tmp_path, keep=1, major=0)
    saver.submit(10, share(10), {"a set": {1}})
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.wait()
    assert names(tmp_path) == []
