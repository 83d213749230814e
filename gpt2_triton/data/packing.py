"""Packed micro-batches: one buffer holds ids, targets, and the tables of the
embedding's backward pass.
"""

import numpy as np
import torch

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SEGMENT = 128  # one program of the embedding backward adds at most this many entries


def scatter_bounds(R: int, vocab_size: int) -> tuple[int, int, int]:
    """Return the largest numbers of segments Ns, split tokens Nh and slots of R ids and R targets.

    E = 2R entries, M = SEGMENT.  A token with c > 0 entries has ceil(c / M) segments, which is
    1 + floor((c - 1) / M).
    Ns     k tokens have at most k + floor((E - k) / M) segments, because floors add up to at most
           the floor of the sum.  The bound grows with k <= min(V, E).  k - 1 tokens of one entry
           and one token with the rest reach it.
    Nh     A split token has M + 1 entries or more, so Nh = min(V, floor(E / (M + 1))).
    slots  The segments of h split tokens are at most h + floor((E - h) / M), and h is at most Nh.
           h - 1 tokens of M + 1 entries and one token with the rest reach this bound.
           It is 0 without split tokens.
    """
    entries = 2 * R
    present = min(vocab_size, entries)
    split = min(vocab_size, entries // (SEGMENT + 1))
    segments = present + (entries - present) // SEGMENT
    slots = split + (entries - split) // SEGMENT if split else 0
    return segments, split, slots


def scatter_table(
    ids: np.ndarray, targets: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return int32 tables: which entries each row of wte's gradient adds, and in which order.

    Entry e < R adds dx[e] to wte[ids[e]]; entry e >= R adds ks[e - R] * lnf[e - R] to
    wte[targets[e - R]].  A target of -1 has no entry.  Unused elements of the tables are zero.
    order [2R]            entries sorted by token, and by e for equal tokens
    segments [Ns, 4]      (token, start, length, slot): order[start : start + length] are entries of
                          `token`, at most SEGMENT of them.  With slot -1 these are all of its
                          entries, and their sum is added to its row; otherwise the sum is stored in
                          partial row `slot`
    split_tokens [Nh, 4]  (token, first_slot, count, 0): the partial rows of a token with more than
                          SEGMENT entries

    For example SEGMENT = 2, ids = 7 4 7, targets = 4 7 9.  Entries 0 to 5 belong to tokens
    7 4 7 4 7 9; token 4 has entries 1 3, token 7 has 0 2 4, token 9 has 5:
    order         1 3 0 2 4 5
    segments      (4, 0, 2, -1)  (7, 2, 2, 0)  (7, 4, 1, 1)  (9, 5, 1, -1)
    split_tokens  (7, 0, 2, 0)                    row 7 gets partial rows 0 and 1
    """
    order, token, count = _sort_entries(np.concatenate([ids, targets]), vocab_size)
    max_segments, max_split, _ = scatter_bounds(len(ids), vocab_size)
    segments = np.zeros((max_segments, 4), np.int32)
    split_tokens = np.zeros((max_split, 4), np.int32)
    _cut_segments(token, count, segments, split_tokens)
    return order, segments, split_tokens


def _sort_entries(tokens: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the entries sorted by token, the tokens that occur, and how often each does."""
    entries = np.flatnonzero(tokens >= 0)
    keys = tokens[entries]
    # by radix, five times as fast as int32 keys
    by_token = np.argsort(keys.astype(np.uint16), kind="stable")
    if vocab_size > 1 << 16:
        by_token = by_token[np.argsort((keys[by_token] >> 16).astype(np.uint8), kind="stable")]
    order = np.zeros(len(tokens), np.int32)
    order[: len(entries)] = entries[by_token]
    counts = np.bincount(keys, minlength=vocab_size)
    token = np.flatnonzero(counts)
    return order, token, counts[token]


def _cut_segments(
    token: np.ndarray, count: np.ndarray, segments: np.ndarray, split_tokens: np.ndarray
) -> None:
    """Fill the tables of scatter_table for tokens with `count` entries each."""
    parts = -(-count // SEGMENT)
    is_split = parts > 1
    slots = np.where(is_split, parts, 0)
    first_slot = np.where(is_split, np.cumsum(slots) - slots, -1)

    owner = np.repeat(np.arange(len(token)), parts)  # of each segment
    part = np.arange(len(owner)) - (np.cumsum(parts) - parts)[owner]
    used = segments[: len(owner)]
    used[:, 0] = token[owner]
    used[:, 1] = (np.cumsum(count) - count)[owner] + SEGMENT * part
    used[:, 2] = np.minimum(SEGMENT, count[owner] - SEGMENT * part)
    used[:, 3] = first_slot[owner] + part  # a token with one segment: -1 + 0
    split_tokens[: is_split.sum(), :3] = np.stack([token, first_slot, parts], axis=1)[is_split]


def packed_size(R: int, vocab_size: int) -> int:
    """Return the int32 elements of ids R | targets R | order 2R | segments
    4*Ns | split_tokens 4*Nh.
    """
    max_segments, max_split, _ = scatter_bounds(R, vocab_size)
    return 4 * R + 4 * max_segments + 4 * max_split


def pack_batch(
    buffer: torch.Tensor | None,
    ids: np.ndarray,
    targets: np.ndarray,
    vocab_size: int,
    head_row: int = 0,
) -> torch.Tensor:
    """Write ids and targets, int32 [B, T], and their tables as packed_size says; an untied head's
    rows begin at `head_row`.  Return the buffer, int32 [packed_size]; None makes one.
    """
    rows = head_row + vocab_size
    if buffer is None:
        buffer = torch.empty(packed_size(ids.size, rows), dtype=torch.int32)
    ids = ids.reshape(-1)
    targets = targets.reshape(-1)
    head_rows = np.where(targets < 0, -1, targets + head_row)
    tables = scatter_table(ids, head_rows, rows)
    np.concatenate([ids, targets, *(table.reshape(-1) for table in tables)], out=buffer.numpy())
    return buffer


def unpack_batch(buffer: torch.Tensor, R: int, Ns: int, Nh: int) -> Parts:
    """Return views of a buffer, int32: ids and targets [R], order [2R], segments [Ns, 4] and
    split_tokens [Nh, 4].
    """
    sizes = R, R, 2 * R, 4 * Ns, 4 * Nh
    ids, targets, order, segments, split_tokens = buffer[: sum(sizes)].split(sizes)
    return ids, targets, order, segments.view(Ns, 4), split_tokens.view(Nh, 4)
