"""Saving: a kill at any line leaves the old checkpoint or the new one; pruning
keeps what was asked for.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from gpt2_triton.checkpoint import format, load, save
from gpt2_triton.checkpoint.format import STATE
from gpt2_triton.checkpoint.load import find_checkpoint, verify
from gpt2_triton.checkpoint.save import Retention
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.errors import CheckpointError
from tests.support.checkpoints import (
    FILES,
    STEP_10,
    STEP_20,
    STEP_30,
    example,
    load_checkpoint,
    names,
    record_syncs,
    state,
    write,
)


def test_run_directory_that_was_moved_is_made_again_with_one_warning(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    for step in (10, 20, 30):
        if step == 20:
            run.rename(tmp_path / "moved")
        assert verify(write(run / "checkpoints", step)) == ""
        err = capsys.readouterr().err
        assert (f"warning: {run}: moved or removed during the run; " in err) == (step == 20), step
    assert names(tmp_path / "moved" / "checkpoints") == [STEP_10]
    assert names(run / "checkpoints") == [STEP_20, STEP_30]


def test_moved_run_saves_nothing_in_the_run_that_has_its_name_since(tmp_path):
    """It would prune the other's checkpoints, also after the other has ended."""
    run = tmp_path / "run"
    write(run / "checkpoints", 10)
    for name in (".lock", "config.yaml"):
        (run / name).write_text("pid 0 on host, started")
        with pytest.raises(OSError, match="run is another run; give this run's"):
            write(run / "checkpoints", 20)
        (run / name).unlink()
    assert names(run / "checkpoints") == [STEP_10]
    write(run / "checkpoints", 20)


def test_step_is_replaced_whatever_is_there(newest):
    """As after a rewind to it, which moves on in the data; the other steps stay."""
    save.save_checkpoint(newest.parent, 20, example(21), state(20, sample=99), Retention(0))
    saved, tensors = load_checkpoint(newest)
    assert saved["sample"] == 99 and tensors["params"].equal(example(21)["params"])
    (newest / STATE).write_text("{}")
    assert write(newest.parent, 20) == newest and verify(newest) == ""
    assert sorted(os.listdir(newest.parent)) == [STEP_10, STEP_20]


def test_files_have_the_permissions_of_other_new_files(newest):
    """Others of a group read a shared run."""
    (newest / "x").touch()
    assert {path.stat().st_mode for path in newest.iterdir()} == {(newest / "x").stat().st_mode}


def test_save_needs_neither_modes_nor_synced_directories(newest, monkeypatch):
    """Mounts of Windows refuse chmod, and CIFS has no fsync of directories."""

    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def sync_files_alone(file):
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fsync", sync_files_alone)
    assert verify(write(newest.parent, 30)) == ""


def test_old_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(newest, monkeypatch, capsys):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(save, "_discard", refuse)
    assert verify(write(newest.parent, 30, keep=1)) == ""
    assert names(newest.parent) == [STEP_10, STEP_20, STEP_30]
    assert f"warning: {newest}: cannot be deleted (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_failed_save_leaves_nothing_and_older_checkpoints_intact(newest, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="injected"):
        write(newest.parent, 30, keep=1)
    assert names(newest.parent) == [STEP_10, STEP_20] and find_checkpoint(newest.parent) == newest


def test_save_syncs_files_before_the_rename_and_directories_after_it(tmp_path, monkeypatch):
    """After a power cut the content of the files, then their names, then the rename must
    be on disk, in this order.
    """
    run, tokenizer = tmp_path, ["tokenizer.json", "tokenizer_config.json"]
    (run / "source").mkdir()
    for name in tokenizer:
        (run / "source" / name).touch()
    events = record_syncs(monkeypatch)
    config = {"data": {"tokenizer": "sha256:1"}}
    saved = state(10, config=config)
    save.save_checkpoint(run / "checkpoints", 10, example(10), saved, Retention(0))
    temporary = f"{run}/checkpoints/.{STEP_10}.tmp"
    assert sorted(events[:5]) == sorted(f"{temporary}/{name}" for name in [*FILES, *tokenizer])
    assert events[5:] == [temporary, "rename", f"{run}/checkpoints", str(run)]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replaced_step_is_removed_after_the_new_names_are_on_disk(
    newest, monkeypatch, can_exchange
):
    if not can_exchange:
        monkeypatch.setattr(save, "_exchange", lambda one, other: False)
    events = record_syncs(monkeypatch)
    remove = save.remove
    monkeypatch.setattr(save, "remove", lambda path: (events.append("remove"), remove(path)))
    save.save_checkpoint(newest.parent, 20, example(21), state(20, sample=99), Retention(0))
    assert events[-3:] == [str(newest.parent), str(newest.parent.parent), "remove"]
    assert load_checkpoint(newest)[0]["sample"] == 99 and verify(newest) == ""
    assert sorted(os.listdir(newest.parent)) == [STEP_10, STEP_20]


# ---- a disk without room ----

SIZE = sum(tensor.nbytes for tensor in example(10).values())
NEEDED = SIZE + save.FILES_BYTES


def leave_room(patch, directory, room):
    """Let the disk hold `room` bytes beside the two checkpoints in `directory`;
    a deleted one makes room.
    """
    total = room + bytes_in(directory)
    patch.setattr(save, "free_space", lambda _: total - bytes_in(directory))


def bytes_in(directory):
    return sum(file.stat().st_size for file in directory.glob("step_*/*"))


@pytest.mark.parametrize("keep, missing", [(1, 1), (2, 1), (1, 0)])
def test_save_deletes_what_it_supersedes_first_where_room_is_missing(
    newest, monkeypatch, keep, missing
):
    written, seen = save._write, []
    monkeypatch.setattr(
        save, "_write", lambda *given: (seen.append(names(newest.parent)), written(*given))
    )
    leave_room(monkeypatch, newest.parent, NEEDED - missing)
    write(newest.parent, 30, keep)
    assert seen == [[STEP_10, STEP_20][missing:]]
    assert names(newest.parent) == [STEP_20, STEP_30][-keep:]


@pytest.mark.parametrize(
    ("keep", "damaged", "room"),
    [(0, "", -1), (2, STEP_20, -1), (1, "", -SIZE - 5000)],
    ids=["all are kept", "the other one is damaged", "too little"],
)
def test_save_without_room_deletes_neither_the_last_intact_checkpoint_nor_in_vain(
    newest, monkeypatch, keep, damaged, room
):
    if damaged:
        (newest.parent / damaged / STATE).write_text("{}")
    leave_room(monkeypatch, newest.parent, NEEDED + room)
    with pytest.raises(
        OSError, match=rf"No space left on device: {NEEDED:,} bytes needed, [0-9,]+ free"
    ):
        write(newest.parent, 30, keep)
    assert names(newest.parent) == [STEP_10, STEP_20]


def test_save_without_room_keeps_the_best_until_a_better_one_is_whole(tmp_path, monkeypatch):
    def lose_power(*_):
        raise OSError("lost power")

    def save_as_best(step, best, keep):
        saved = state(step, best=[best, 1.0])
        save.save_checkpoint(tmp_path, step, example(step), saved, Retention(keep))

    for step in (10, 20, 30):
        save_as_best(step, best=10, keep=0)
    leave_room(monkeypatch, tmp_path, NEEDED - 1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="^lost power"):
        patch.setattr(save, "_write", lose_power)
        save_as_best(40, best=40, keep=1)
    assert names(tmp_path) == [STEP_10, STEP_30]
    leave_room(monkeypatch, tmp_path, NEEDED - 1)
    with pytest.raises(OSError, match="No space left on device"):
        save_as_best(40, best=40, keep=1)
    assert names(tmp_path) == [STEP_10, STEP_30]


# ---- the trial at a run's start ----


def test_trial_leaves_nothing(tmp_path, newest):
    for directory in (tmp_path / "run" / "checkpoints", newest.parent):
        (tmp_path / "run").mkdir(exist_ok=True)
        save.try_to_save(directory)
    assert not os.listdir(tmp_path / "run") and names(newest.parent) == [STEP_10, STEP_20]


def test_trial_removes_what_killed_trials_left(newest):
    for name in (f".{save.TRIAL}.tmp", save.TRIAL):
        (newest.parent / name).mkdir()
    save.try_to_save(newest.parent)
    assert names(newest.parent) == [STEP_10, STEP_20]


@pytest.mark.parametrize("call", ["mkdir", "rename", "fsync"])
def test_trial_refuses_a_directory_that_keeps_no_checkpoint(tmp_path, monkeypatch, call):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can be saved there \(.*Operation not permitted"
    ):
        save.try_to_save(tmp_path / "checkpoints")
    monkeypatch.undo()
    assert not os.listdir(tmp_path)


def test_trial_names_the_rank_that_does_not_see_the_directory(tmp_path):
    """Rank 1 has a directory of the same name on another disk; all ranks end."""
    store, places = HashStore(), [tmp_path / "shared", tmp_path / "own"]

    def refusal(rank):
        with pytest.raises(CheckpointError) as refused:
            save.try_to_save(places[rank], ControlGroup("trial", rank, 2, store))
        return str(refused.value)

    with ThreadPoolExecutor(2) as ranks:
        messages = list(ranks.map(refusal, range(2)))
    assert all("(rank 1: " in message and "No such file" in message for message in messages)
    assert not os.listdir(tmp_path)


# ---- kills ----

TRACED = {module.__file__ for module in (save, load, format, shutil)}


def killed_at_line(n, save_step):
    """Save in a child that kill -9 ends at the n-th line, rmtree's included; False
    if there are fewer lines.
    """
    child = os.fork()
    if child == 0:
        lines = 0

        def trace(frame, event, _):
            nonlocal lines
            if frame.f_code.co_filename not in TRACED:
                return None
            lines += event == "line"
            if lines == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        save_step()
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def kill_at_every_line(directory, save_step=lambda directory: write(directory, 30, keep=1)):
    """Save step 30 in place of 10 and 20, killed at each line in turn; print the step
    that a run would resume from.
    """
    n = 1
    write_missing(directory)
    while killed_at_line(n, lambda: save_step(directory)):
        assert all(verify(path) == "" for path in directory.glob("step_*")), n
        found = find_checkpoint(directory)
        print(found.name)
        if found.name == STEP_30:
            save._discard(found)
        write_missing(directory)
        n += 1


def write_missing(directory):
    for step in (10, 20):
        if not format.step_path(directory, step).exists():
            write(directory, step)


def kill_at_every_line_without_room(directory):
    """As kill_at_every_line, where step 10 has to go before step 30 is written."""

    def save_step(directory):
        leave_room(pytest.MonkeyPatch(), directory, NEEDED - 1)
        write(directory, 30, keep=1)

    kill_at_every_line(directory, save_step)


def kill_at_every_line_of_a_replacement(directory):
    """Save step 30 in place of a step 30 with another state, killed at each line in
    turn; print the state found.
    """
    n = 1
    write(directory, 30)
    new = (directory, 30, example(31), state(30, sample=99), Retention(0))
    while killed_at_line(n, lambda: save.save_checkpoint(*new)):
        assert verify(found := find_checkpoint(directory)) == "", n
        print(name := "new" if load_checkpoint(found)[0]["sample"] else "old")
        if name == "new":
            save._discard(found)
            write(directory, 30)
        n += 1


def outcomes(function, directory):
    """Call a function of this file in a separate process, as it forks, and
    this one may have threads.
    """
    code = (
        "import sys, pathlib, tests.checkpoint.test_save as t; "
        f"t.{function.__name__}(pathlib.Path(sys.argv[1]))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, directory], capture_output=True, text=True, cwd=root
    )
    assert done.returncode == 0, done.stderr
    write(directory, 40)
    # nothing of the killed saves remains
    assert not [name for name in os.listdir(directory) if name.startswith(".")]
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_at_every_line, kill_at_every_line_without_room])
def test_save_killed_at_any_line_leaves_the_old_checkpoint_or_the_new_one(tmp_path, kill):
    found = outcomes(kill, tmp_path)
    assert found == sorted(found) and set(found) == {STEP_20, STEP_30} and len(found) > 50


@pytest.mark.slow
def test_replacement_killed_at_any_line_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    found = outcomes(kill_at_every_line_of_a_replacement, tmp_path)
    assert found == sorted(found, reverse=True) and set(found) == {"old", "new"} and len(found) > 50


def test_save_removes_what_killed_saves_left(newest):
    for name in (f".{STEP_30}.tmp", f".{STEP_10}.old", f".{STEP_30}.tmp-123-456", "notes"):
        (newest.parent / name).mkdir()
        (newest.parent / name / "file").touch()
    write(newest.parent, 30)
    assert names(newest.parent) == ["notes", STEP_10, STEP_20, STEP_30]


PRUNED = {(0, 0): [10, 20, 30, 40], (1, 0): [40], (2, 0): [30, 40], (9, 0): [10, 20, 30, 40]}
PRUNED |= {(1, 20): [20, 40], (2, 20): [20, 30, 40], (1, 30): [30, 40], (0, 20): [10, 20, 30, 40]}


@pytest.mark.parametrize(("keep", "every"), PRUNED)
def test_pruning_keeps_the_newest_and_the_multiples(tmp_path, keep, every):
    for step in (10, 20, 30, 40):
        write(tmp_path, step, keep, every)
    assert names(tmp_path) == [f"step_{step:08d}" for step in PRUNED[keep, every]]


def test_pruning_does_not_count_a_damaged_later_step_as_the_newest(newest):
    """Resumed from 10 because 20 is damaged, a run that saves 15 with keep=1 keeps 15."""
    (newest / FILES[0]).write_bytes(b"")
    assert write(newest.parent, 15, keep=1) == find_checkpoint(newest.parent)
    assert names(newest.parent) == ["step_00000015", STEP_20]
