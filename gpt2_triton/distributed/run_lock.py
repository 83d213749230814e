"""Lock of a run directory: one process at a time writes to the directory.  Rank 0
holds the lock for all ranks.

The lock is flock on RUN/.lock; the system frees it when its process ends or is killed.  The file
names the process.  On a file system without flock the file itself is the lock: after a kill the
user must delete the file.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from gpt2_triton.errors import ConfigError

NAME = ".lock"
MOST_BYTES = 300  # that a message quotes from the file
# flock's errors on file systems without it; EBADF: on NFS, of a file that is another user's
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)


@contextlib.contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Make `run_dir` and hold its lock; ConfigError if another process holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    file = _take(run_dir / NAME)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the directory is gone, or cannot be written
            if not is_anothers(run_dir):
                (run_dir / NAME).unlink()
        os.close(file)


def is_anothers(run_dir: Path) -> bool:
    """Return whether `run_dir` is a run that this process has not locked: its own was moved, and
    another has its name since.
    """
    try:
        holder = (run_dir / NAME).read_text(errors="replace")
    except FileNotFoundError:  # that run has ended, or a save has made the directory again
        return (run_dir / "config.yaml").exists()
    return holder.startswith("pid ") and not holder.startswith(f"pid {os.getpid()} ")


def _take(path: Path) -> int:
    """Return the descriptor of the locked file, which now names this process."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    _lock(file, path)
    if os.fstat(file).st_nlink == 0:  # its holder has just ended and deleted the file
        os.close(file)
        return _take(path)
    holder = f"pid {os.getpid()} on {socket.gethostname()}, started {time.strftime('%F %T')},"
    with contextlib.suppress(OSError):  # a full disk: the run's next file reports it
        os.ftruncate(file, 0)
        os.pwrite(file, holder.encode(), 0)
    return file


def _lock(file: int, path: Path) -> None:
    """Lock the file; ConfigError if another process holds the lock, or may hold it."""
    holder = os.pread(file, MOST_BYTES, 0).decode(errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"--run_dir: {holder or 'another process'} writes to {path.parent}; "
            "wait for its end, or choose another"
        ) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        if holder:
            raise ConfigError(
                f"--run_dir: {holder} may write to {path.parent}; "
                f"if it has ended, delete {path}, since this file system has no flock"
            ) from None
