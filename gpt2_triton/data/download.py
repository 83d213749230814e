"""Downloads that can be cut off: what has arrived stays in a hidden file, and the next attempt asks for the rest."""

import fcntl
import hashlib
import os
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

from gpt2_triton.data.progress import Progress
from gpt2_triton.errors import bad_data

TIMEOUT = 30  # seconds without an answer or a byte
BLOCK = 1 << 18


def fetch(url: str, target: Path, sha256: str, todo: str) -> Path:
    """`target`, downloaded from `url` unless it is there; it is put in place by a rename, once its sha256 is right.

    A connection that breaks is opened again for as long as that brings new bytes.  DataError, which ends with `todo`,
    if the file cannot be had or is another one.  Processes that want the same file wait for the first.
    """
    if _sha256(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with open(part, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _sha256(target) == sha256:  # another process was first
            part.unlink(missing_ok=True)
            return target
        _complete(url, file, todo)
        os.fsync(file.fileno())
        found = _sha256(part)
        if found != sha256:
            part.unlink(missing_ok=True)
            raise bad_data(url, "wrong sha256", found, sha256, f"try again, or {todo}")
        os.rename(part, target)
    return target


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete(url: str, file: BinaryIO, todo: str) -> None:
    while True:
        had = os.fstat(file.fileno()).st_size
        try:
            return _append(url, file, had)
        except (OSError, HTTPException) as error:  # URLError, a timeout and a broken connection are OSErrors
            if os.fstat(file.fileno()).st_size <= had:
                reason = getattr(error, "reason", None) or error
                raise bad_data(url, "cannot download", reason, "the file", todo) from error


def _append(url: str, file: BinaryIO, had: int) -> None:
    """Append what `file`, of `had` bytes, lacks of the resource; ConnectionError if the server stops before its end."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={had}-"} if had else {})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and had:  # nothing lies behind what is there; the hash will tell whether that is all
            return
        raise
    with answer:
        if answer.status != 206:  # the whole, although a part was asked for
            file.truncate(0)
            had = 0
        length = int(answer.headers["Content-Length"] or 0)
        progress = Progress(f"downloading {url}", had + length, "bytes")
        progress.done = had
        while block := answer.read(BLOCK):
            file.write(block)
            file.flush()
            progress.advance(len(block))
    if progress.done < had + length:
        raise ConnectionError(f"it broke off after {progress.done:,} of {had + length:,} bytes")
