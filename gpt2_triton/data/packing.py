"""Packed micro-batches: ids and targets with the tables of the embedding's deterministic backward, in one buffer."""

import numpy as np
import torch

SEGMENT = 128  # most entries that one program of the embedding backward adds up


def scatter_bounds(R: int, vocab_size: int) -> tuple[int, int, int]:
    """Most segments Ns, hot tokens Nh and slots that R ids and R targets can need; each is reached by some input.

    E = 2R entries, M = SEGMENT.  A token with c > 0 entries has ceil(c / M) = 1 + floor((c - 1) / M) segments.
    Ns: k present tokens have at most k + floor((E - k) / M), as floors sum to at most the floor of the sum.  This grows
        with k <= min(V, E); one token of E - k + 1 entries beside k - 1 tokens of one entry reach it.
    Nh: a hot token has M + 1 entries or more, so min(V, floor(E / (M + 1))), reached by that many of M + 1 entries.
    Slots are the segments of hot tokens, for h of them h + floor((E - h) / M) as above, at h = Nh, reached by h - 1
        tokens of M + 1 entries beside one with the rest; 0 if there cannot be any.
    """
    entries = 2 * R
    present, hot = min(vocab_size, entries), min(vocab_size, entries // (SEGMENT + 1))
    return present + (entries - present) // SEGMENT, hot, hot + (entries - hot) // SEGMENT if hot else 0


def scatter_table(ids: np.ndarray, targets: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What adds up to each row of wte's gradient, in which order: int32 order [2R], segments [Ns, 4], hot [Nh, 4].

    Entry e < R adds dx[e] to wte[ids[e]]; entry e >= R adds ks[e - R] * lnf[e - R] to wte[targets[e - R]].  A target
    of -1 has no entry.
    order:    entries sorted by token, those of one token by e; then zeros that nothing refers to.
    segments: (token, start, length, slot): order[start : start + length] are entries of `token`, length <= SEGMENT.
              With slot -1 these are all it has, and their sum goes to its row; else it goes to partial row `slot`.
    hot:      (token, first_slot, count, 0): the partial rows of a token with more than SEGMENT entries.
    Unused rows of segments and hot are zero.
    """
    assert vocab_size <= 1 << 16, vocab_size
    R = len(ids)
    max_segments, max_hot, _ = scatter_bounds(R, vocab_size)
    tokens = np.concatenate([ids, targets])
    entries = np.flatnonzero(tokens >= 0)
    keys = tokens[entries].astype(np.uint16)  # numpy sorts 16-bit keys by radix: 1 ms for 131,072, 5 to 8 ms as int32
    order = np.zeros(2 * R, np.int32)
    order[: len(entries)] = entries[np.argsort(keys, kind="stable")]

    counts = np.bincount(keys, minlength=vocab_size)
    token = np.flatnonzero(counts)
    count = counts[token]
    pieces = -(-count // SEGMENT)
    slots = np.where(pieces > 1, pieces, 0)
    first_slot = np.where(pieces > 1, np.cumsum(slots) - slots, -1)

    owner = np.repeat(np.arange(len(token)), pieces)  # of each segment
    piece = np.arange(len(owner)) - (np.cumsum(pieces) - pieces)[owner]
    segments = np.zeros((max_segments, 4), np.int32)
    used = segments[: len(owner)]
    used[:, 0] = token[owner]
    used[:, 1] = (np.cumsum(count) - count)[owner] + SEGMENT * piece
    used[:, 2] = np.minimum(SEGMENT, count[owner] - SEGMENT * piece)
    used[:, 3] = first_slot[owner] + piece  # a token with one segment: -1 + 0

    is_hot = pieces > 1
    hot = np.zeros((max_hot, 4), np.int32)
    hot[: is_hot.sum(), :3] = np.stack([token, first_slot, pieces], axis=1)[is_hot]
    return order, segments, hot


def packed_size(R: int, vocab_size: int) -> int:
    """Elements of a packed micro-batch of R rows, int32: ids R | targets R | order 2R | segments 4*Ns | hot 4*Nh."""
    max_segments, max_hot, _ = scatter_bounds(R, vocab_size)
    return 4 * R + 4 * max_segments + 4 * max_hot


def pack_batch(buffer: torch.Tensor | None, ids: np.ndarray, targets: np.ndarray, vocab_size: int) -> torch.Tensor:
    """Lay int32 ids and targets [B, T] and their tables out in `buffer` (None: a new one) as packed_size says."""
    if buffer is None:
        buffer = torch.empty(packed_size(ids.size, vocab_size), dtype=torch.int32)
    ids, targets = ids.reshape(-1), targets.reshape(-1)
    tables = scatter_table(ids, targets, vocab_size)
    np.concatenate([ids, targets, *(table.reshape(-1) for table in tables)], out=buffer.numpy())
    return buffer
