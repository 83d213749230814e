"""Rows that begin at a document (data.align document): where the training rows of each shard start.

The first row of a shard starts at its first end-of-text token, each later one at the first such token that follows the
inputs of the row before.  The tokens between a row and the next are the rest of its last document; no row has them.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gpt2_triton.console import Progress
from gpt2_triton.data.shards import Shard
from gpt2_triton.errors import bad_data

CHUNK = 1 << 22  # tokens read at a time


def row_starts(shards: Sequence[Shard], seq_len: int, eot: int) -> list[np.ndarray]:
    """Return the first token of each row of seq_len + 1 tokens, int32 [rows] for each shard; all tokens are read.

    DataError if no shard has such a row.
    """
    starts = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        with Progress("finding documents", sum(2 * shard.count for shard in shards), "bytes") as progress:
            for shard, found in zip(shards, pool.map(lambda shard: _starts(shard, seq_len, eot), shards), strict=True):
                starts.append(found)
                progress.advance(2 * shard.count, shard.path.name)
    if not any(map(len, starts)):
        what, expected = "no row of train.seq_len begins at a document", f"end-of-text tokens, {eot}, before documents"
        raise bad_data(shards[0].path, what, f"none in {len(shards):,} shard(s)", expected, "set data.align to none")
    return starts


def _starts(shard: Shard, seq_len: int, eot: int) -> np.ndarray:
    buffer, parts = np.empty(min(CHUNK, shard.count), "<u2"), []
    for first in range(0, shard.count, CHUNK):
        tokens = buffer[: min(CHUNK, shard.count - first)]
        shard.read(first, tokens)
        parts.append(np.flatnonzero(tokens == eot) + first)
    places = np.concatenate(parts)
    places = places[places + seq_len < shard.count]
    following = np.searchsorted(places, places + seq_len).tolist()  # the row after one that starts there
    chosen, i = [], 0
    while i < len(places):
        chosen.append(i)
        i = following[i]
    return places[chosen].astype(np.int32)
