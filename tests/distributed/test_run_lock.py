"""One writer per run directory: refused while the holder lives, taken over when it is
dead, with and without flock.
"""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_triton.distributed.run_lock import NAME, is_anothers, lock_run_dir
from gpt2_triton.errors import ConfigError

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys; from gpt2_triton.distributed.run_lock import "
    "lock_run_dir; from pathlib import Path"
)
HOLD += "\nwith lock_run_dir(Path(sys.argv[1])): print(1, flush=True); sys.stdin.read()"


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
def without_flock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)


def refuse(run_dir, match):
    with pytest.raises(ConfigError, match=match), lock_run_dir(run_dir):
        pass


def test_second_writer_is_refused_with_host_process_and_start_of_the_first(tmp_path, holder):
    record = (tmp_path / NAME).read_text()
    assert record.startswith(f"pid {holder.pid} on {os.uname().nodename}, started 20")
    refuse(
        tmp_path, f"^--run_dir: {record} writes to {tmp_path}; wait for its end, or choose another$"
    )
    holder.send_signal(signal.SIGSTOP)
    refuse(tmp_path, "writes to")
    assert (tmp_path / NAME).read_text() == record


def test_lock_of_a_dead_process_is_taken_over_at_once(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert (tmp_path / NAME).exists()
    with lock_run_dir(tmp_path):
        assert f"pid {os.getpid()} on" in (tmp_path / NAME).read_text()
    assert os.listdir(tmp_path) == []


def test_file_of_another_user_is_locked_and_replaced_once_its_process_has_ended(
    tmp_path, monkeypatch, holder
):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    refuse(tmp_path, f"^--run_dir: pid {holder.pid} on .* writes to {tmp_path}; wait for its end")
    holder.kill()
    holder.wait()
    with lock_run_dir(tmp_path):
        assert f"pid {os.getpid()} on" in (tmp_path / NAME).read_text()
    assert os.listdir(tmp_path) == []


def test_release_lets_the_next_in(tmp_path):
    for _ in range(2):
        with lock_run_dir(tmp_path / "new"):
            refuse(tmp_path / "new", f"pid {os.getpid()} on")
        assert os.listdir(tmp_path / "new") == []


def test_release_keeps_the_lock_of_a_run_that_took_the_name_of_a_moved_one(tmp_path):
    run = tmp_path / "run"
    with lock_run_dir(run):
        assert not is_anothers(run)
        run.rename(tmp_path / "moved")
        run.mkdir()
        assert not is_anothers(run)  # as a save makes it again
        (run / NAME).write_text("pid 0 on host, started")
        assert is_anothers(run)
    assert (run / NAME).exists()


def test_file_that_its_holder_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    flock, moments = fcntl.flock, iter([(tmp_path / NAME).unlink, lambda: None])
    monkeypatch.setattr(fcntl, "flock", lambda *words: (next(moments)(), flock(*words)))
    with lock_run_dir(tmp_path):
        assert f"pid {os.getpid()} on" in (tmp_path / NAME).read_text()


def test_without_flock_the_file_is_the_lock(tmp_path, without_flock, holder):
    holder.kill()
    holder.wait()
    refuse(
        tmp_path,
        f"pid {holder.pid} on .*, may write to {tmp_path}; "
        f"if it has ended, delete {tmp_path / NAME}, ",
    )
    (tmp_path / NAME).unlink()
    with lock_run_dir(tmp_path):
        refuse(tmp_path, f"pid {os.getpid()} on .*, may write to")
    assert os.listdir(tmp_path) == []
