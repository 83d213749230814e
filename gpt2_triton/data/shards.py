"""Shards: tokens on disk in llm.c's .bin format, written whole or not at all, and checked before training.

A shard is a header of 256 little-endian int32 (MAGIC, VERSION, number of tokens ntok, then zeros) and the tokens as
uint16: 1024 + 2 * ntok bytes in all.
"""

import functools
import hashlib
import json
import os
import shlex
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.console import command_line
from gpt2_triton.errors import bad_data
from gpt2_triton.files import expand_glob, is_text, sha256, write_atomic

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024
EDGE_BYTES = 1 << 16  # of each end of a shard that the fingerprint of earlier versions covers
BLOCKS, BLOCK_TOKENS = 32, 512  # that a fingerprint covers
RECORD = "shards.json"  # next to the shards: tokenizer, settings, source, sizes and sha256
CORRECT = "correct data.train and data.val"
PREPARE = f"make shards with `{command_line('prepare')}`"
PREPARE_RECIPE = {  # the arguments that make the shards of a recipe, by their directory
    "fineweb10B": "pretokenized fineweb10B",
    "fineweb100B": "pretokenized fineweb100B",
    "fineweb-edu-100B": "pretokenized fineweb-edu-100B",
    "shakespeare": "text tinyshakespeare.txt --out data/shakespeare",
}


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write one shard of uint16 tokens."""
    assert tokens.dtype == np.uint16 and tokens.ndim == 1 and 0 < len(tokens) < 2**31, (tokens.dtype, tokens.shape)
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    write_atomic(path, header.tobytes(), np.ascontiguousarray(tokens, "<u2").data)


class OpenFiles:
    """The files read last, kept open: a set of shards can have more files than a process may open."""

    def __init__(self, most: int = 128):
        self._most, self._lock = most, threading.Lock()
        self._handles: OrderedDict[Path, int] = OrderedDict()  # the file read last at the end

    def read_into(self, path: Path, buffer: memoryview, start: int) -> tuple[int, os.stat_result]:
        """Fill `buffer` from byte `start` on; return the bytes read, fewer at the end of the file, and its state after
        that.  Unlike a mapping, which gets SIGBUS where a file was cut off.
        """
        with self._lock:
            handle = self._handle(path)
            done = 0
            while done < len(buffer) and (got := os.preadv(handle, [buffer[done:]], start + done)):
                done += got
            return done, os.fstat(handle)

    def _handle(self, path: Path) -> int:
        if path in self._handles:
            self._handles.move_to_end(path)
        else:
            self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._handles) > self._most:
                os.close(self._handles.popitem(last=False)[1])
        return self._handles[path]

    def __del__(self) -> None:
        for handle in self._handles.values():
            os.close(handle)


class Shard:
    """A shard on disk: `count` tokens, at least one window.  `read` checks that the file is still the one opened."""

    def __init__(self, path: Path | str, vocab_size: int, seq_len: int, files: OpenFiles | None = None, todo: str = ""):
        """`todo`: what to do about a shard that does not suit the model; by default, to change the configuration."""
        self.path, self.vocab_size, self._todo = Path(path), vocab_size, todo
        self._files = files or OpenFiles()
        try:
            self.count, self._state = read_header(self.path)
        except OSError as error:
            raise bad_data(self.path, "cannot read", error.strerror, "a shard", PREPARE) from None
        if self.count < seq_len + 1:
            fewest, lower = f"seq_len + 1 = {seq_len + 1:,} or more", "lower train.seq_len or leave this file out"
            raise bad_data(self.path, "too short", f"{self.count:,} tokens", fewest, todo or lower)

    def read(self, first: int, out: np.ndarray) -> None:
        """Fill `out`, uint16 [n], with the tokens from `first` on; DataError if the file has changed or is gone.

        The caller checks them by `require_known`, many windows at once.
        """
        self._fill(out.data.cast("B"), HEADER_BYTES + 2 * first)

    def _fill(self, buffer: memoryview, start: int) -> None:
        expected, todo = f"the file of {self._state.st_size:,} bytes as opened", "restore it and resume"
        try:
            done, state = self._files.read_into(self.path, buffer, start)
        except OSError as error:
            raise bad_data(self.path, f"cannot read byte {start:,}", error.strerror, expected, todo) from None
        if done < len(buffer):
            what, got = f"cut off while it was read, at byte {start + done:,}", f"{state.st_size:,} bytes"
            raise bad_data(self.path, what, got, expected, todo)
        if state.st_nlink == 0:
            what = f"removed or replaced while it was read, at byte {start:,}"
            raise bad_data(self.path, what, "another file or none", expected, todo)
        if (state.st_size, state.st_mtime_ns) != (self._state.st_size, self._state.st_mtime_ns):
            self._accept_new_time(state, f"changed while it was read, at byte {start:,}", expected, todo)

    def _accept_new_time(self, state: os.stat_result, what: str, expected: str, todo: str) -> None:
        """Accept another time of the same content, as after `touch` or a copy; DataError for another content."""
        known = self.__dict__.get("fingerprint")  # that of the opening, which checkpoints hold
        if known is None or state.st_size != self._state.st_size or known != self._fingerprint():
            raise bad_data(self.path, what, f"{state.st_size:,} bytes of other content", expected, todo)
        self._state = state  # reads below compare with the new time

    @property
    def mtime_ns(self) -> int:
        return self._state.st_mtime_ns

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The name, the size and a hash of the content, for JSON.  A checkpoint holds it, so that a resumed run can be
        refused other data.

        `blocks` is the sha256 of the header and of BLOCKS blocks at equal distances, the first and the last tokens
        among them; a small file has the `sha256` of all of it.  The time of the file is no part of it, because a copy
        on another machine has a new one.  0.3 ms for a file in the page cache.  The tokens of the blocks are checked
        against the vocabulary, so that data of another tokenizer is refused before the run begins.
        """
        return self._fingerprint()

    def _fingerprint(self) -> dict[str, Any]:
        if self._state.st_size <= HEADER_BYTES + 2 * EDGE_BYTES:
            return self.fingerprint_of_ends
        firsts = [i * (self.count - BLOCK_TOKENS) // (BLOCKS - 1) for i in range(BLOCKS)]
        places = [(HEADER_BYTES + 2 * first, 2 * BLOCK_TOKENS) for first in firsts]
        header, *pieces = self._read_pieces([(0, HEADER_BYTES), *places])
        blocks = b"".join(pieces)
        self.require_known(np.frombuffer(blocks, "<u2").reshape(BLOCKS, BLOCK_TOKENS), firsts)
        digest = hashlib.sha256(header + blocks).hexdigest()
        return {"name": self.path.name, "bytes": self._state.st_size, "blocks": digest}

    @property
    def fingerprint_of_ends(self) -> dict[str, Any]:
        """The fingerprint in checkpoints of earlier versions: the sha256 of the header and 64 KiB at each end."""
        size = self._state.st_size
        start = max(HEADER_BYTES, size - EDGE_BYTES)
        head, tail = self._read_pieces([(0, min(HEADER_BYTES + EDGE_BYTES, size)), (start, size - start)])
        self.require_known(np.frombuffer(head, "<u2", offset=HEADER_BYTES)[None], [0])
        self.require_known(np.frombuffer(tail, "<u2")[None], [(start - HEADER_BYTES) // 2])
        return {"name": self.path.name, "bytes": size, "sha256": hashlib.sha256(head + tail).hexdigest()}

    def verify(self) -> bool:
        """Compare the sha256 of the whole file with that in shards.json next to it; DataError if it is another, False
        if there is none.
        """
        shards = read_record(self.path.with_name(RECORD)).get("shards")
        row = shards.get(self.path.name) if isinstance(shards, dict) else None
        if not isinstance(row, dict) or "sha256" not in row:
            return False
        try:
            found = sha256(self.path)
        except OSError as error:
            raise bad_data(self.path, "cannot read", error.strerror, "a shard", PREPARE) from None
        if found != row["sha256"]:
            raise bad_data(self.path, "damaged", f"sha256 {found}", f"{row['sha256']} as in {RECORD}", PREPARE)
        return True

    def _read_pieces(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes at each (start, length), without a place among the open files."""
        expected, todo = f"{self._state.st_size:,} bytes as when it was opened", "restore it and resume"
        try:
            with open(self.path, "rb", buffering=0) as file:
                pieces = [os.pread(file.fileno(), length, start) for start, length in places]
        except OSError as error:
            raise bad_data(self.path, "cannot read", error.strerror, expected, todo) from None
        for (start, length), piece in zip(places, pieces, strict=True):
            if len(piece) < length:
                raise bad_data(self.path, "cut off", f"{start + len(piece):,} bytes", expected, todo)
        return pieces

    def require_known(self, rows: np.ndarray, firsts: Sequence[int]) -> None:
        """DataError for a token outside the vocabulary, which the embedding kernel would read out of bounds.

        rows: uint16 [any, n], the tokens from numbers `firsts` of the shard on
        """
        if self.vocab_size == 1 << 16 or not rows.size or rows.max() < self.vocab_size:
            return
        row, column = divmod(int((rows >= self.vocab_size).argmax()), rows.shape[1])
        at = firsts[row] + column
        what = f"token {at:,} (byte {HEADER_BYTES + 2 * at:,}) outside the vocabulary"
        todo = self._todo or "set model.vocab_size and data.tokenizer to those of this data"
        raise bad_data(self.path, what, rows[row, column], f"less than {self.vocab_size:,}", todo)


def read_header(path: Path) -> tuple[int, os.stat_result]:
    """Return the number of tokens of a shard and the state of its file; DataError if its header or size is wrong."""
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):  # to open a pipe would wait for its writer
        kind = "a directory" if stat.S_ISDIR(state.st_mode) else "a pipe or a device"
        raise bad_data(path, "no shard", kind, "a .bin file", "leave it out, or narrow the pattern")
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        state, header = os.fstat(handle), os.pread(handle, HEADER_BYTES, 0)
    finally:
        os.close(handle)
    todo = "it was cut off or overwritten: copy or prepare it again"
    if len(header) < HEADER_BYTES:
        raise bad_data(path, "no header", f"{state.st_size:,} bytes", f"more than {HEADER_BYTES:,}", todo)
    magic, version, count = struct.unpack_from("<3i", header)
    if magic != MAGIC:
        raise bad_data(
            path, "wrong magic number", magic, f"{MAGIC} (llm.c's uint16 shards; nanoGPT's have no header)", PREPARE
        )
    if version != VERSION:
        raise bad_data(path, "wrong version", version, VERSION, PREPARE)
    if count < 1:
        raise bad_data(path, "no tokens", f"a count of {count} in the header", "1 or more", todo)
    size, whole = state.st_size, HEADER_BYTES + 2 * count
    if size != whole:
        expected = f"{whole:,} for the {count:,} tokens of its header"
        raise bad_data(path, "wrong size", f"{size:,} bytes", expected, todo)
    return count, state


def map_tokens(path: Path) -> np.memmap:
    """Return the memory-mapped tokens of a shard, uint16 [count]; DataError if its header or size is wrong."""
    count, _ = read_header(path)
    return np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


def open_shards(pattern: str, vocab_size: int, seq_len: int, todo: str = "") -> list[Shard]:
    """Return every shard that matches a path or glob, in the order of their names, the header of each checked.  `todo`
    is what to do about a pattern without files or a shard that does not suit the model; by default, to change the
    configuration.
    """
    paths = expand_glob(pattern)
    if os.path.isdir(pattern):
        raise bad_data(
            pattern,
            "no shard",
            "a directory",
            "a path or glob of .bin files",
            f"name its files, as {pattern}/train_*.bin",
        )
    if not paths:
        arguments = PREPARE_RECIPE.get(os.path.basename(os.path.dirname(pattern)))
        make = f"make shards with `{command_line('prepare')} {arguments}`" if arguments else PREPARE
        make = f"{make}, or {todo or CORRECT}"
        raise bad_data(pattern, "no such shards", "0 files", "a path or glob of .bin files", make)
    files = OpenFiles()
    return [Shard(path, vocab_size, seq_len, files, todo) for path in paths]


def require_tokenizer(pattern: str, tokenizer: str, todo: str = "") -> None:
    """DataError for text, and if the record next to the shards names another tokenizer; shards of other projects have
    no record.  `todo` as in open_shards.

    Bytes are also tokens of GPT-2's vocabulary, so such a run would train, but on the wrong text.
    """
    found = expand_glob(pattern)
    if text := [path for path in found if is_text(path)]:
        made = f"{command_line('prepare text')} {shlex.quote(text[0])} --tokenizer {tokenizer} --out data/shards"
        raise bad_data(text[0], "no shard", "text", "a .bin file of tokens", f"`{made}` makes data/shards/*.bin")
    for record in sorted({Path(path).parent / RECORD for path in found}):
        made_with = read_record(record).get("tokenizer", tokenizer)
        if made_with != tokenizer:
            change = f"set data.tokenizer and model.vocab_size to those of {made_with}, or choose other data"
            raise bad_data(record, "made with another tokenizer", made_with, tokenizer, todo or change)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a preparation; empty if there is none that can be read."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
