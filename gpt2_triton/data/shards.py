"""Shards: tokens on disk in llm.c's .bin format, written whole or not at all,
and checked before training.

A shard is a header of 256 little-endian int32 (magic, version, number of tokens, then
zeros) and the tokens.  They are uint16, as GPT-2's, or uint32 for a vocabulary of
more than 65,536, as Llama 3's.
"""

import functools
import hashlib
import os
import re
import shlex
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.console import command_line
from gpt2_triton.data.text_names import is_text
from gpt2_triton.data.tokenizer import NAMES, has_tokens_of
from gpt2_triton.errors import DataError
from gpt2_triton.files import expand_glob, object_in, write_atomic

# magic and version: type of the tokens
FORMATS: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
HEADER_BYTES = 1024
EDGE_BYTES = 1 << 16  # hashed at each end of a small shard
BLOCKS, BLOCK_TOKENS = 32, 512  # hashed in a large shard
RECORD = "shards.json"  # next to the shards: tokenizer, settings, source, sizes and sha256
SET_VOCABULARY = "choose other data, or set model.vocab_size and data.tokenizer as it needs"
RESTORE = "restore it and resume"
PREPARE = f"make shards with `{command_line('prepare')}`"
# directory of a recipe's shards: arguments of `prepare` for GPT-2's tokens, and for Llama 3's
PREPARE_RECIPE = {
    "fineweb10B": ("pretokenized fineweb10B", "fineweb"),
    "fineweb100B": ("pretokenized fineweb100B", "fineweb --version sample-100BT"),
    "fineweb-edu-100B": ("pretokenized fineweb-edu-100B", "fineweb-edu --version sample-100BT"),
    "shakespeare": ("text tinyshakespeare.txt --out data/shakespeare", "text tinyshakespeare.txt"),
}


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type of a vocabulary's tokens in shards."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write one shard of uint16 or uint32 tokens."""
    [(magic, version)] = [start for start, dtype in FORMATS.items() if dtype == tokens.dtype]
    assert tokens.ndim == 1 and 0 < len(tokens) < 2**31, tokens.shape
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = magic, version, len(tokens)
    write_atomic(path, header.tobytes(), np.ascontiguousarray(tokens).data)


class Shard:
    """A shard on disk: `count` tokens, at least one window.  `read`
    refuses a file that has changed.
    """

    def __init__(self, path: Path | str, vocab_size: int, seq_len: int):
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.mixed: dict[str, Any] = {}  # of a mixture: source and share, for the fingerprint
        try:
            self.dtype, self.count, self._state = read_header(self.path)
        except OSError as error:
            raise DataError(f"{self.path}: cannot read: {error.strerror}; {PREPARE}") from None
        if self.count < seq_len + 1:
            raise DataError(
                f"{self.path}: too short: {self.count:,} tokens, fewer than seq_len + 1 = "
                f"{seq_len + 1:,}; leave it out, or take a smaller train.seq_len; "
                "perplexity has --seq_len"
            )
        needed = token_dtype(vocab_size)
        if self.dtype != needed:
            raise DataError(
                f"{self.path}: another tokenizer's: tokens of {self.dtype}, and a vocabulary of "
                f"{vocab_size:,} has {needed}; {SET_VOCABULARY}"
            )

    def read(self, first: int, count: int) -> np.ndarray:
        """Return `count` tokens from `first` on, unchecked; DataError if the
        file has changed or is gone.
        """
        size = self.dtype.itemsize
        [tokens] = self._pread([(HEADER_BYTES + size * first, size * count)])
        return np.frombuffer(tokens, self.dtype)

    def _pread(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes at each (start, length); DataError if the file has changed since."""
        # no mmap: a file that is cut off raises SIGBUS.  No open handles: a process
        # may hold too few for all shards
        try:
            with open(self.path, "rb", buffering=0) as file:
                pieces = [os.pread(file.fileno(), length, start) for start, length in places]
                state = os.fstat(file.fileno())
        except OSError as error:
            raise DataError(f"{self.path}: cannot read: {error.strerror}; {RESTORE}") from None
        if (state.st_size, state.st_mtime_ns) != (self._state.st_size, self._state.st_mtime_ns):
            before = self._state.st_size
            self._state = state
            # clusters keep files that are not old, so users `touch` theirs
            known = self.__dict__.get("fingerprint")
            if before != state.st_size or not known or known != self._fingerprint():
                raise DataError(
                    f"{self.path}: changed while the run reads it, "
                    f"at byte {places[0][0]:,}; {RESTORE}"
                )
        return pieces

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Name, size and a hash of the content, for JSON.  A resumed run compares it with
        its checkpoint's fingerprint.

        `blocks` is the sha256 of the header and of BLOCKS blocks at equal distances, from the
        first token to the last.  A small file has the `sha256` of its whole content.  The file's
        time is left out, because a copy changes it.  DataError for tokens outside the
        vocabulary, before the run begins.
        """
        return self._fingerprint()

    def _fingerprint(self) -> dict[str, Any]:
        if self._state.st_size <= HEADER_BYTES + 2 * EDGE_BYTES:
            return self.fingerprint_of_ends()
        firsts = [i * (self.count - BLOCK_TOKENS) // (BLOCKS - 1) for i in range(BLOCKS)]
        size = self.dtype.itemsize
        blocks = self._hash(
            [(HEADER_BYTES + size * first, size * BLOCK_TOKENS) for first in firsts]
        )
        found = {"name": self.path.name, "bytes": self._state.st_size, "blocks": blocks}
        return found | self.mixed

    def fingerprint_of_ends(self) -> dict[str, Any]:
        """Return the fingerprint in checkpoints of version 0.1: the sha256 of the header
        and of 64 KiB at each end.
        """
        size = self._state.st_size
        first = max(HEADER_BYTES, size - EDGE_BYTES)
        places = [(HEADER_BYTES, min(EDGE_BYTES, size - HEADER_BYTES)), (first, size - first)]
        found = {"name": self.path.name, "bytes": size, "sha256": self._hash(places)}
        return found | self.mixed

    def _hash(self, places: Sequence[tuple[int, int]]) -> str:
        """Return the sha256 of header and tokens at (start, length), in bytes; check the tokens."""
        pieces = self._pread([(0, HEADER_BYTES), *places])
        for (start, _), piece in zip(places, pieces[1:]):
            first = (start - HEADER_BYTES) // self.dtype.itemsize
            self.require_known(np.frombuffer(piece, self.dtype), first)
        return hashlib.sha256(b"".join(pieces)).hexdigest()

    def require_known(self, tokens: np.ndarray, first: int) -> None:
        """DataError for a token outside the vocabulary; `tokens` begin with
        the shard's token `first`.
        """
        if tokens.max() < self.vocab_size:
            return
        i = int((tokens >= self.vocab_size).argmax())
        raise DataError(
            f"{self.path}: token {first + i:,} (byte "
            f"{HEADER_BYTES + self.dtype.itemsize * (first + i):,}) outside the vocabulary: "
            f"{tokens[i]}, must be less than {self.vocab_size:,}; {SET_VOCABULARY}"
        )


def read_header(path: Path) -> tuple[np.dtype, int, os.stat_result]:
    """Return type and number of a shard's tokens, and its file's state; DataError if
    its header or size is wrong.
    """
    with open(path, "rb", buffering=0) as file:
        header = file.read(HEADER_BYTES)
        state = os.fstat(file.fileno())
    todo = "it was cut off or overwritten: copy or prepare it again (in a clone: git lfs pull)"
    if len(header) < HEADER_BYTES:
        raise DataError(f"{path}: no header in {state.st_size:,} bytes; {todo}")
    magic, version, count = struct.unpack_from("<3i", header)
    dtype = FORMATS.get((magic, version))
    if dtype is None:
        expected = " or ".join(f"{known} {number}" for known, number in FORMATS)
        raise DataError(
            f"{path}: not a shard: it begins with {magic} {version}; "
            f"llm.c's shards begin with {expected}, nanoGPT's have no header; "
            f"{PREPARE}, of nanoGPT's with `prepare nanogpt DIR`"
        )
    if count < 1 or state.st_size != HEADER_BYTES + dtype.itemsize * count:
        raise DataError(
            f"{path}: wrong size: {state.st_size:,} bytes, and {count:,} "
            f"tokens by its header; {todo}"
        )
    return dtype, count, state


def map_tokens(path: Path) -> np.memmap:
    """Return the memory-mapped tokens of a shard, dtype [count]; DataError if
    its header or size is wrong.
    """
    dtype, count, _ = read_header(path)
    return np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(count,))


def open_shards(pattern: str, vocab_size: int, seq_len: int) -> list[Shard]:
    """Return the shards that match a path or glob, in the order of their
    names, with headers checked.
    """
    if os.path.isdir(pattern):
        raise DataError(
            f"{pattern}: a directory; name the shards in it, as {pattern}/train_*.bin or val_*.bin"
        )
    paths = expand_glob(pattern)
    if not paths:
        raise _no_shards(pattern, vocab_size)
    return [Shard(path, vocab_size, seq_len) for path in paths]


def _no_shards(pattern: str, vocab_size: int) -> DataError:
    """Return the error about a pattern without files, with the command that makes them."""
    directory = os.path.dirname(pattern)
    arguments, others = PREPARE_RECIPE.get(os.path.basename(directory), ("", ""))
    if others and token_dtype(vocab_size).itemsize == 4:
        arguments = f"{others} --tokenizer llama3 --out {shlex.quote(directory)}"
    own = re.search("_([a-z0-9]+)_[0-9a-f]{8}$", directory)  # of `train own`
    if own:
        arguments = f"text YOUR_TEXT --tokenizer {own[1]} --out {shlex.quote(directory)}"
    make = f"make shards with `{command_line('prepare')} {arguments}`" if arguments else PREPARE
    weights = ""
    if "," in pattern:
        weights = "; of several patterns each needs its weight, as A=3,B=1"
    return DataError(f"{pattern}: no such shards; {make}, or correct the pattern{weights}")


def require_tokenizer(pattern: str, tokenizer: str) -> None:
    """Raise DataError for text, or if shards.json names a tokenizer whose tokens this one has not
    under the same ids: the byte 65 is no GPT-2 token 65.
    """
    found = expand_glob(pattern)
    text = [path for path in found if is_text(path) and Path(path).name != RECORD]
    if text:
        raise DataError(
            f"{text[0]}: text, not a shard; `{command_line('prepare text')} {shlex.quote(text[0])} "
            f"--tokenizer {tokenizer} --out data/shards` makes data/shards/*.bin"
        )
    for record in sorted({Path(path).parent / RECORD for path in found}):
        made_with = str(object_in(record).get("tokenizer", tokenizer))
        if not has_tokens_of(tokenizer, made_with, record.parent):
            theirs = made_with if made_with in NAMES else record.parent  # its file lies there
            raise DataError(
                f"{record}: made with another tokenizer, {made_with}, not {tokenizer}; prepare the "
                f"text with --tokenizer {tokenizer}, or take a model with data.tokenizer {theirs}"
            )
