"""File writes that a crash cannot leave half done; also fsync, sha256, JSON, free space, globs."""

import errno
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpt2_triton.errors import UserError

HASH_BYTES = 1 << 22
HIDDEN = ".tmp"  # ends the name of what is being written
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk or a quota has no room
OF_RUST = re.compile(r"\(os error (\d+)\)")  # in what safetensors and tokenizers raise


class FileError(UserError):
    """A file or a directory is not what is asked for."""


def fsync(path: Path) -> None:
    """Flush a file's content, or a directory's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # CIFS and sshfs sync no directories
            raise
    finally:
        os.close(handle)


def sha256(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """Return the hex digest of a file's content; `advance` gets the
    number of bytes of each part.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(HASH_BYTES):
            digest.update(part)
            advance(len(part))
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; FileError if there is another thing."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: cannot be read ({error}); expected a JSON object") from None
    if not isinstance(content, dict):
        raise FileError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def object_in(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} if the file is missing, damaged or another thing."""
    try:
        return read_json(path)
    except FileError:
        return {}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of the block that names no file, as a full disk's does, or the
    hidden one; raise one for a library in Rust, which has errors of its own.
    """
    try:
        yield
    except OSError as error:
        if error.errno and str(error.filename or HIDDEN).endswith(HIDDEN):
            error.filename = str(path)
        raise
    except UserError:
        raise
    except Exception as error:
        found = OF_RUST.search(str(error))
        if not found:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def write_atomic(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file so that a crash leaves the old one or the new one: hidden file,
    fsync, rename, fsync directory.
    """
    hidden = path.with_name(f".{path.name}.{os.urandom(4).hex()}{HIDDEN}")
    try:
        with naming(path), open(hidden, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.rename(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)
    fsync(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object by write_atomic."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_atomic(path, text.encode(errors="backslashreplace"))  # a path may hold other bytes


def copy_mode(model: Path, path: Path) -> None:
    """Give a file the permissions of another: safetensors makes its files private."""
    with suppress(OSError):  # mounts of Windows refuse it
        shutil.copymode(model, path)


def require_new(path: Path) -> None:
    """Raise FileError if `path` is a file, a mount point, or a directory with content."""
    if path.is_file() or path.is_mount() or (path.is_dir() and any(path.iterdir())):
        raise FileError(f"{path} is there already; choose another, or remove it")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a hidden directory, which one rename makes `path` at the end;
    FileError if `path` has content.
    """
    require_new(path)
    hidden = path.absolute().with_name(f".{path.name}.{os.urandom(4).hex()}{HIDDEN}")
    try:
        with naming(path):
            hidden.mkdir(parents=True)
            yield hidden
            for file in (*hidden.iterdir(), hidden):
                fsync(file)
        os.rename(hidden, path)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    fsync(path.absolute().parent)


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def expand(path: str) -> str:
    """Return a path with ~/ and environment variables such as $DATA in place of their values."""
    return os.path.expanduser(os.path.expandvars(path))


def expand_glob(pattern: str) -> list[str]:
    """Return the paths that match a glob, expanded and sorted.  A path that exists is
    taken literally, with [ or *.
    """
    pattern = pattern if os.path.lexists(pattern) else expand(pattern)
    return [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))


def free_space(directory: Path) -> int:
    """Return the free bytes of the disk of `directory`, which may not exist yet."""
    there = next(
        path for path in (directory.absolute(), *directory.absolute().parents) if path.exists()
    )
    return shutil.disk_usage(there).free
