"""File writes that a crash cannot leave half done, and what goes with them: fsync, sha256, free space."""

import errno
import glob
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt2_triton.errors import CheckpointError, ConfigError, UserError

HASH_BYTES = 1 << 22
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a write without space: on the disk, or in a quota
MARK = r"([0-9]+(?:-[0-9]+)?)"  # of a process in the name of a file that it is writing


def open_regular(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return a descriptor of a file, which is also made here with O_CREAT; to be given to `open` as its opener.

    OSError for what is not a regular file, at once: to open a pipe would wait for its other end.
    """
    irregular = OSError(errno.EINVAL, f"{Path(path).name} is not a regular file", str(path))
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        raise irregular if error.errno == errno.ENXIO else error from None  # a pipe without a reader, or a socket
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise irregular


def read_regular(path: Path, most: int | None = None) -> bytes:
    """Return the content of a regular file; OSError if it has more than `most` bytes, which are then not all read."""
    with open(path, "rb", opener=open_regular) as file:
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise OSError(errno.EFBIG, f"{path.name} has more than {most:,} bytes", str(path))
    return content


def fsync(path: Path) -> None:
    """Flush a file's content, or a directory's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """Return the hex digest of a file's content; `advance` is called with the bytes of each part of it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(HASH_BYTES):
            digest.update(part)
            advance(len(part))
    return digest.hexdigest()


def write_atomic(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file so that a crash leaves the old one or the new one: hidden file, fsync, rename, fsync directory."""
    hidden = path.with_name(f".{path.name}.{os.urandom(4).hex()}.{process_mark()}.tmp")  # marks repeat on other hosts
    try:
        with open(hidden, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.rename(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)
    fsync(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a hidden directory that becomes `path` by one rename at the end, its files synced.

    A failure leaves nothing.  ConfigError if `path` exists and is not an empty directory.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(f"{path} is there already; choose another, or remove it")
    hidden = path.absolute().with_name(f".{path.name}.tmp-{process_mark()}")
    hidden.mkdir(parents=True)
    try:
        yield hidden
        for file in (*hidden.iterdir(), hidden):
            fsync(file)
        os.rename(hidden, path)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    fsync(path.absolute().parent)


def process_mark(pid: int | None = None) -> str:
    """Return PID-START, which no process before or after it has: START is in clock ticks since the kernel booted.

    A number alone returns: in a container every first process is number 1.  Without /proc START is 0.
    """
    pid = pid or os.getpid()
    return f"{pid}-{_start_ticks(pid) or 0}"


def _start_ticks(pid: int) -> int | None:
    """Return the start of a process; None if there is none of this number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def _is_running(mark: str) -> bool:
    """Return whether the process of the mark is running; the marks of earlier versions have no start."""
    pid, _, start = mark.partition("-")
    found = _start_ticks(int(pid))
    return found is not None and start in ("", str(found))


def remove_abandoned(directory: Path, hidden: re.Pattern[str], own: bool = False) -> None:
    """Remove the entries of `directory` whose names match `hidden` and whose process has ended.

    Group 1 of the pattern, MARK, is the process's mark.  `own` also removes this process's entries.
    """
    for path in directory.iterdir():
        match = hidden.fullmatch(path.name)
        if match and (own and match[1] == process_mark() or not _is_running(match[1])):
            remove(path)


def remove(path: Path) -> None:
    """Remove a directory with all that is in it, as far as possible, or what else has this name; `shutil.rmtree` would
    wait for the other end of a pipe.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


TEXT_SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")  # of text that can be tokenised


def is_text(path: str | Path) -> bool:
    """Return whether the name is that of text to tokenise."""
    return str(path).endswith(TEXT_SUFFIXES)


def expand_glob(pattern: str) -> list[str]:
    """Return the paths that match a glob, sorted.

    A path, or a directory at its beginning, that exists by that very name stands for itself: [1] in it is no pattern.
    """
    if os.path.lexists(pattern):
        return [pattern]
    rest = Path(pattern)
    while not os.path.isdir(rest) and rest != rest.parent:
        rest = rest.parent
    inner = Path(pattern).relative_to(rest)
    return sorted(glob.glob(os.path.join(glob.escape(str(rest)), str(inner)), recursive=True))


def run_dir_error(run_dir: Path, error: OSError) -> UserError:
    """Return the error for a run directory in which a file cannot be made, read or written: CheckpointError, as for
    one without room for a checkpoint, if the disk or a quota is full.
    """
    if error.errno in FULL:
        what = f"{error.strerror}, {_free_space(run_dir):,} bytes free on its disk"
        return CheckpointError(f"--run_dir: no room in {run_dir}: {what}; make room, or choose another")
    return ConfigError(f"--run_dir: cannot write to {run_dir}: {error.strerror}; choose another")


def missing_space(directory: Path, needed: int) -> tuple[int, int] | None:
    """Return (needed, free) in bytes if `needed` bytes do not fit under `directory`, which may not exist yet."""
    free = _free_space(directory)
    return (needed, free) if free < needed else None


def _free_space(directory: Path) -> int:
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
