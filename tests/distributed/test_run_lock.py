"""One writer per run directory: refused while the holder lives, taken over when it is dead, with and without flock."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2_triton.distributed import run_lock
from gpt2_triton.distributed.run_lock import NAME, RunLock, other_writer
from gpt2_triton.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[2]
HOLD = "import sys; from gpt2_triton.distributed import run_lock; from pathlib import Path"
HOLD += "; run_lock.INTERVAL = 0.05; lock = run_lock.RunLock(Path(sys.argv[1])); print(1, flush=True); sys.stdin.read()"


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path until it is killed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout and process.stdout.readline() == b"1\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def elsewhere(monkeypatch):
    """This process is on another host, whose flock does not see the holder's."""
    monkeypatch.setattr(run_lock, "_boot", lambda: "another boot")


def without_flock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(run_lock, "SETTLE", 0.05)


def written(run_dir):
    return json.loads((run_dir / NAME).read_text())


def test_second_writer_is_refused_with_host_process_and_start_of_the_first(tmp_path, holder):
    record = written(tmp_path)
    who = f"pid {holder.pid} on {record['host']}, started {record['started']},"
    with pytest.raises(ConfigError, match=f"^--run_dir: {who} writes to {tmp_path}; [^\n]*$"):
        RunLock(tmp_path)
    assert written(tmp_path)["token"] == record["token"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_lock_of_a_dead_process_is_taken_over_at_once(tmp_path, holder, capsys, how):
    holder.send_signal(how)
    holder.wait()
    with RunLock(tmp_path):
        assert written(tmp_path)["pid"] == os.getpid()
    assert os.listdir(tmp_path) == [] and capsys.readouterr().out == ""


def test_other_writer_is_a_living_one(tmp_path, holder):
    assert other_writer(tmp_path / "new") == ""
    assert other_writer(tmp_path).startswith(f"pid {holder.pid} on ") and other_writer(tmp_path).endswith(", writes")
    holder.kill()
    holder.wait()
    assert other_writer(tmp_path) == "" and (tmp_path / NAME).exists()
    with RunLock(tmp_path):
        assert other_writer(tmp_path) == ""  # it is this process


@pytest.mark.timeout(60)
def test_other_writer_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(OSError, match="not a regular file"):
        other_writer(tmp_path)


@pytest.mark.parametrize("flock", [True, False], ids=["flock per host", "no flock"])
def test_other_writer_on_another_host_may_live(tmp_path, monkeypatch, holder, elsewhere, flock):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    if not flock:
        without_flock(monkeypatch)
    assert other_writer(tmp_path).startswith(f"pid {holder.pid} on ") and other_writer(tmp_path).endswith(", may write")
    (tmp_path / NAME).write_text("[1, 2")
    assert other_writer(tmp_path) == ""


def test_stopped_holder_keeps_the_lock(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError, match="writes to"):
        RunLock(tmp_path)


def test_release_lets_the_next_in_and_removes_what_was_made(tmp_path):
    for _ in range(2):
        with RunLock(tmp_path / "new"), pytest.raises(ConfigError):
            RunLock(tmp_path / "new")
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("flock", [True, False], ids=["flock per host", "no flock"])
def test_living_holder_on_another_host_is_seen_by_its_beats(tmp_path, monkeypatch, holder, elsewhere, capsys, flock):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    if not flock:
        without_flock(monkeypatch)
    with pytest.raises(ConfigError, match=f"pid {holder.pid} on"):
        RunLock(tmp_path)
    assert capsys.readouterr().out.startswith(f"waiting up to 40 s: pid {holder.pid} on ")


@pytest.mark.parametrize("flock", [True, False], ids=["flock per host", "no flock"])
def test_dead_holder_on_another_host_is_replaced_after_the_lease(tmp_path, monkeypatch, holder, elsewhere, flock):
    monkeypatch.setattr(run_lock, "LEASE", 1.0)
    holder.kill()
    holder.wait()
    if not flock:
        without_flock(monkeypatch)
    began = time.monotonic()
    with RunLock(tmp_path):
        assert written(tmp_path)["pid"] == os.getpid() and time.monotonic() - began >= 1.0


def test_without_flock_the_last_of_two_records_written_together_counts(tmp_path, monkeypatch):
    without_flock(monkeypatch)
    other = {"host": "b", "pid": 7, "started": "now", "boot": "", "token": "theirs", "beats": 1}
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / NAME).write_text(json.dumps(other)))
    with pytest.raises(ConfigError, match="pid 7 on b, started now, writes"):
        RunLock(tmp_path)
    assert written(tmp_path) == other


def test_holder_that_was_replaced_ends(tmp_path, holder):
    """It was stopped for longer than the lease."""
    holder.send_signal(signal.SIGSTOP)
    (tmp_path / NAME).write_text(json.dumps(written(tmp_path) | {"token": "another", "pid": 7}))
    holder.send_signal(signal.SIGCONT)
    assert holder.wait() == 1
    assert written(tmp_path)["pid"] == 7


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_holder_locks_the_directory_that_replaces_a_removed_one(tmp_path, monkeypatch, how):
    monkeypatch.setattr(run_lock, "INTERVAL", 0.01)
    run = tmp_path / "run"
    with RunLock(run):
        if how == "moved":
            run.rename(tmp_path / "elsewhere")
        else:
            (run / NAME).unlink()
            run.rmdir()
        while not (run / NAME).exists() or not (run / NAME).read_text():
            time.sleep(0.01)
        with pytest.raises(ConfigError, match=f"pid {os.getpid()} on"):
            RunLock(run)


def test_run_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to .*; choose another"):
        RunLock(tmp_path / "file" / "run")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync"])
@pytest.mark.parametrize("flock", [True, False], ids=["flock", "no flock"])
def test_full_disk_is_refused_with_the_bytes_free_and_leaves_nothing(tmp_path, monkeypatch, number, call, flock):
    if not flock:
        without_flock(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1234))
    monkeypatch.setattr(os, call, lambda *_: refuse_write(number))
    for run in (tmp_path / "new", tmp_path):
        with pytest.raises(CheckpointError) as error:
            RunLock(run)
        what = f"no room in {run}: {os.strerror(number)}, 1,234 bytes free on its disk"
        assert str(error.value) == f"--run_dir: {what}; make room, or choose another"
        assert os.listdir(tmp_path) == []


def test_full_disk_leaves_the_record_of_a_dead_process(tmp_path, monkeypatch, holder):
    holder.kill()
    holder.wait()
    before = written(tmp_path)
    monkeypatch.setattr(os, "pwrite", lambda *_: refuse_write(errno.ENOSPC))
    with pytest.raises(CheckpointError, match="no room in"):
        RunLock(tmp_path)
    assert written(tmp_path) == before


def refuse_write(number):
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("text", ["[1, 2", "[" * 100_000, "7", "{}"], ids=lambda text: text[:6])
def test_damaged_record_holds_nothing(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with RunLock(tmp_path):
        assert written(tmp_path)["pid"] == os.getpid()


@pytest.mark.timeout(60)
def test_damaged_record_does_not_end_the_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "INTERVAL", 0.01)
    with RunLock(tmp_path) as lock:
        (tmp_path / NAME).write_text("[" * 100_000)
        while (tmp_path / NAME).stat().st_size > 1000 and lock._thread.is_alive():
            time.sleep(0.01)
        assert lock._thread.is_alive()
    assert os.listdir(tmp_path) == []
