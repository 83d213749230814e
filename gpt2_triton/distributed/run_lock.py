"""Lock of a run directory: one process at a time writes to it.  Rank 0 holds it, for all ranks.

    RUN/.lock    {"host", "pid", "started", "boot", "token", "beats"}: its holder, whose thread counts `beats` up

The lock is the kernel's flock on that file, which ends with the process, however that ends.  Some file systems have no
flock, or one that other hosts do not see.  There the record decides: its holder lives if `beats` changes within LEASE
seconds.  No two clocks are compared.

                                     holder on this host         holder on another host, or no flock
    holder lives, or is stopped      refused at once             refused within INTERVAL (if its flock is seen: at once)
    holder has ended                 lock taken                  lock taken
    holder was killed                lock taken over at once     lock taken over after LEASE
    two start in the same moment     one is refused              one is refused, or ends within INTERVAL

A holder that was stopped for longer than LEASE and finds another's record ends with exit code 1.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from gpt2_triton.console import print_line
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import open_regular, read_regular, run_dir_error

NAME = ".lock"
MOST_BYTES = 1 << 12  # of a record
INTERVAL = 10.0  # seconds between two beats
LEASE = 40.0  # seconds without a beat after which a holder that flock knows nothing of counts as dead
SETTLE = 2.0  # seconds until two processes without flock see which of them wrote its record last
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # of flock, by file system

Record = dict[str, Any]
_own_tokens: set[str] = set()  # of this process's records


class RunLock:
    """Holds the lock of `run_dir` from its making to `release`.  The directory is made if it does not exist, and
    removed at the end if it was made here and is empty.

    Raise ConfigError if another process holds the lock, or if the directory cannot be written; CheckpointError if its
    disk is full.  Nothing that was made here is then left.
    """

    def __init__(self, run_dir: Path):
        self._run_dir, self._path = run_dir, run_dir / NAME
        self._record: Record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "boot": _boot(),
            "token": secrets.token_hex(8),
            "beats": 0,
        }
        _own_tokens.add(self._record["token"])
        self._ended = threading.Event()
        self._is_new = False  # the directory
        try:
            self._is_new = not run_dir.exists()
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._take()
        except OSError as error:
            self._remove_directory()
            raise run_dir_error(run_dir, error) from error
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Remove the file and end the lock."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # the directory is gone, or cannot be written
            if _is_file(self._file, self._path) and self._is_own(_read(self._path)):
                self._path.unlink()
        self._remove_directory()
        os.close(self._file)

    def _remove_directory(self) -> None:
        with contextlib.suppress(OSError):  # not empty, or gone
            if self._is_new:
                self._run_dir.rmdir()

    # ---- taking it ----

    def _take(self) -> int:
        """Return the descriptor of the locked file that holds this process's record."""
        while True:
            file, is_new = self._open()
            try:
                has_flock = self._flock(file)
                self._wait_for_holder(has_flock)
                if _is_file(file, self._path):  # else its holder has removed it meanwhile
                    self._write_first(file, is_new)
                    if not has_flock:
                        time.sleep(SETTLE)
                        self._refuse_unless(self._is_own(_read(self._path)))
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _open(self) -> tuple[int, bool]:
        """Return the descriptor of the file, and whether it was made here."""
        try:
            return open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            return open_regular(self._path, os.O_RDWR | os.O_CREAT, 0o644), False

    def _write_first(self, file: int, is_new: bool) -> None:
        """Write the record; remove a file that was made here if the disk refuses that."""
        try:
            self._write(file)
        except OSError:
            holder = _read(self._path)
            if is_new and (holder is None or self._is_own(holder)):
                self._path.unlink(missing_ok=True)
            raise

    def _flock(self, file: int) -> bool:
        """Lock the file; return False where there is no flock; ConfigError if another process has it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._refuse_unless(False)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return False
        return True

    def _wait_for_holder(self, has_flock: bool) -> None:
        """Return when the holder in the file is dead; ConfigError if it lives."""
        holder = _read(self._path)
        if holder is None or has_flock and holder["boot"] == self._record["boot"]:
            return
        print_line(f"waiting up to {LEASE:.0f} s: {_describe(holder)} may write to {self._run_dir}")
        end = time.monotonic() + LEASE
        while time.monotonic() < end:
            time.sleep(LEASE / 40)
            if (now := _read(self._path)) is None:
                return  # it has ended
            self._refuse_unless(now == holder)

    def _refuse_unless(self, free: bool) -> None:
        if not free:
            holder = _read(self._path)
            who = f"{_describe(holder)} writes" if holder else "another process writes"
            raise ConfigError(f"--run_dir: {who} to {self._run_dir}; wait for its end, or choose another")

    # ---- holding it ----

    def _beat(self) -> None:
        while not self._ended.wait(INTERVAL):
            try:
                self._keep()
            except OSError:
                pass  # a full disk, or a file system that does not answer
            except ConfigError as error:
                print_line(f"error: this run has lost its directory and ends: {error}", error=True)
                os._exit(1)

    def _keep(self) -> None:
        """Show that this process lives; ConfigError if another one holds the lock."""
        if _is_file(self._file, self._path):
            holder = _read(self._path)
            self._refuse_unless(holder is None or self._is_own(holder))
            self._write(self._file)
        else:
            self._take_again()

    def _take_again(self) -> None:
        """Lock the new file of a directory that was removed or moved; the log warns of that."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        before, self._file = self._file, self._take()
        os.close(before)

    def _write(self, file: int) -> None:
        self._record["beats"] += 1
        text = json.dumps(self._record).encode()
        os.pwrite(file, text + b"\n", 0)
        os.ftruncate(file, len(text) + 1)
        os.fsync(file)

    def _is_own(self, holder: Record | None) -> bool:
        return holder is not None and holder["token"] == self._record["token"]


def other_writer(run_dir: Path) -> str:
    """Return which other process writes to `run_dir`, or may write, in words; empty if none does.

    This makes no file and waits for no beat: where flock does not decide, the holder in the record may live.  OSError
    if the lock cannot be read.
    """
    path = run_dir / NAME
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # two threads may call this at once
        held, has_flock = False, True
    except OSError as error:
        held, has_flock = isinstance(error, BlockingIOError), False
    finally:
        os.close(file)
    holder = _read(path)
    if holder is None:
        return "another process writes" if held else ""
    if holder["token"] in _own_tokens or has_flock and holder["boot"] == _boot():
        return ""
    return f"{_describe(holder)} {'writes' if held else 'may write'}"


def _is_file(file: int, path: Path) -> bool:
    """Return whether the descriptor is that of the file at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _read(path: Path) -> Record | None:
    """Return the record of the file, opened at each call so that NFS shows what others wrote; None if it has none."""
    try:
        record = json.loads(read_regular(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and {"host", "pid", "started", "boot", "token"} <= record.keys() else None


def _describe(holder: Record) -> str:
    return f"pid {holder['pid']} on {holder['host']}, started {holder['started']},"


def _boot() -> str:
    """Return what tells one running kernel from another: containers of one host share it, as they share flock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
