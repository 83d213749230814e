"""Shards: tokens on disk in llm.c's .bin format, written whole or not at all, and checked before training.

A shard is a header of 256 little-endian int32 (MAGIC, VERSION, number of tokens ntok, then zeros) and the tokens as
uint16: 1024 + 2 * ntok bytes in all.
"""

import glob
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.console import command_line
from gpt2_triton.errors import bad_data
from gpt2_triton.files import write_atomic

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 1024
SCAN = 1 << 22  # tokens checked at a time: 8 MiB
EDGE_BYTES = 1 << 16  # of each end of a shard that its fingerprint covers
RECORD = "shards.json"  # next to the shards: tokenizer, settings, source, sizes and sha256
PREPARE = f"make shards with `{command_line('prepare')}`"


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write one shard of uint16 tokens."""
    assert tokens.dtype == np.uint16 and tokens.ndim == 1 and 0 < len(tokens) < 2**31, (tokens.dtype, tokens.shape)
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    write_atomic(path, header.tobytes(), np.ascontiguousarray(tokens, "<u2").data)


class Shard:
    """A memory-mapped shard: `tokens` is uint16 [ntok], at least one window long, all below vocab_size."""

    def __init__(self, path: Path | str, vocab_size: int, seq_len: int):
        self.path = Path(path)
        try:
            self.tokens = map_tokens(self.path)
        except OSError as error:
            raise bad_data(self.path, "cannot read", error.strerror, "a shard", PREPARE) from None
        if len(self.tokens) < seq_len + 1:
            fewest, todo = f"seq_len + 1 = {seq_len + 1:,} or more", "lower train.seq_len or leave this file out"
            raise bad_data(self.path, "too short", f"{len(self.tokens):,} tokens", fewest, todo)
        if vocab_size < 1 << 16:
            self._check_tokens(vocab_size)

    def _check_tokens(self, vocab_size: int) -> None:
        """DataError for a token outside the vocabulary, which the embedding kernel would read out of bounds.

        The scan takes 7 ms for 100 million tokens in the page cache; otherwise it is as fast as the disk.
        """
        for start in range(0, len(self.tokens), SCAN):
            chunk = self.tokens[start : start + SCAN]
            if chunk.max() >= vocab_size:
                at = start + int((chunk >= vocab_size).argmax())
                what = f"token {at:,} (byte {HEADER_BYTES + 2 * at:,}) outside the vocabulary"
                todo = "set model.vocab_size and data.tokenizer to those of this data"
                raise bad_data(self.path, what, self.tokens[at], f"less than {vocab_size:,}", todo)


def map_tokens(path: Path) -> np.memmap:
    """Return the memory-mapped tokens of a shard, uint16 [ntok]; DataError if its header or size is wrong."""
    size, header = path.stat().st_size, np.fromfile(path, "<i4", HEADER_BYTES // 4)
    todo = "it was cut off or overwritten: copy or prepare it again"
    if header.nbytes < HEADER_BYTES:
        raise bad_data(path, "no header", f"{size:,} bytes", f"more than {HEADER_BYTES:,}", todo)
    magic, version, ntok = header[:3].tolist()
    if magic != MAGIC:
        raise bad_data(
            path, "wrong magic number", magic, f"{MAGIC} (llm.c's uint16 shards; nanoGPT's have no header)", PREPARE
        )
    if version != VERSION:
        raise bad_data(path, "wrong version", version, VERSION, PREPARE)
    if ntok < 1:
        raise bad_data(path, "no tokens", f"a count of {ntok} in the header", "1 or more", todo)
    whole = HEADER_BYTES + 2 * ntok
    if size != whole:
        raise bad_data(path, "wrong size", f"{size:,} bytes", f"{whole:,} for the {ntok:,} tokens of its header", todo)
    return np.memmap(path, "<u2", mode="r", offset=HEADER_BYTES, shape=(ntok,))


def open_shards(pattern: str, vocab_size: int, seq_len: int) -> list[Shard]:
    """Return every shard that matches a path or glob, in the order of their names, each checked in full."""
    paths = _matches(pattern)
    if os.path.isdir(pattern):
        raise bad_data(
            pattern,
            "no shard",
            "a directory",
            "a path or glob of .bin files",
            f"name its files, as {pattern}/train_*.bin",
        )
    if not paths:
        todo = f"{PREPARE}, or correct data.train and data.val"
        raise bad_data(pattern, "no such shards", "0 files", "a path or glob of .bin files", todo)
    return [Shard(path, vocab_size, seq_len) for path in paths]


def require_tokenizer(pattern: str, tokenizer: str) -> None:
    """DataError if the record next to the shards names another tokenizer; shards of other projects have no record.

    Bytes are also tokens of GPT-2's vocabulary, so such a run would train, but on the wrong text.
    """
    for record in sorted({Path(path).parent / RECORD for path in _matches(pattern)}):
        made_with = read_record(record).get("tokenizer", tokenizer)
        if made_with != tokenizer:
            todo = f"set data.tokenizer and model.vocab_size to those of {made_with}, or choose other data"
            raise bad_data(record, "made with another tokenizer", made_with, tokenizer, todo)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a preparation; empty if there is none that can be read."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _matches(pattern: str) -> list[str]:
    return [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern))


def fingerprint(shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """Return, for JSON, each shard's name, size and sha256 of its header, first and last 64 KiB.

    A checkpoint holds this, so that a resumed run can be refused other data.
    """
    rows = []
    for shard in shards:
        with open(shard.path, "rb") as file:
            digest = hashlib.sha256(file.read(HEADER_BYTES + EDGE_BYTES))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(HEADER_BYTES, size - EDGE_BYTES))
            digest.update(file.read())
        rows.append({"name": shard.path.name, "bytes": size, "sha256": digest.hexdigest()})
    return rows
