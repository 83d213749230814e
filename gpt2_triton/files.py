"""File writes that a crash cannot leave half done, and what goes with them: fsync, sha256, free space."""

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt2_triton.errors import ConfigError

HASH_BYTES = 1 << 22


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
    hidden = path.with_name(f".{path.name}.{os.urandom(4).hex()}.{os.getpid()}.tmp")  # pids repeat on other hosts
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
        raise ConfigError(f"--out: {path} is there already; choose another, or remove it")
    hidden = path.absolute().with_name(f".{path.name}.tmp-{os.getpid()}")
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


def remove_abandoned(directory: Path, hidden: re.Pattern[str], own: bool = False) -> None:
    """Remove the entries of `directory` whose names match `hidden` and whose process has ended.

    Group 1 of the pattern is the process id.  `own` also removes this process's entries.
    """
    for path in directory.iterdir():
        match = hidden.fullmatch(path.name)
        if match and ((own and int(match[1]) == os.getpid()) or not Path(f"/proc/{match[1]}").exists()):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


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


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """Yield the path, or, if it is not UTF-8, another to the same file that is, since safetensors takes no other."""
    if str(path).isascii() or os.fsencode(path) == str(path).encode(errors="replace"):
        yield path
        return
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{handle}") / path.name
    finally:
        os.close(handle)


def missing_space(directory: Path, needed: int) -> tuple[int, int] | None:
    """Return (needed, free) in bytes if `needed` bytes do not fit under `directory`, which may not exist yet."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    return (needed, free) if free < needed else None
