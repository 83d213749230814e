"""Philox4x32-10 in numpy, and the masks of dropout that the kernels make of it."""

import numpy as np
import torch

DROPOUT = 3


def philox(seed, first, n, step, purpose):
    """Return word i % 4 of Philox4x32-10 on the counter (i // 4 low, i // 4 high,
    step, purpose), in numpy.
    """
    counter = first // 4 + np.arange(-(-n // 4), dtype=np.uint64)
    c0, c1, c2, c3 = (
        counter & 0xFFFFFFFF,
        counter >> 32,
        np.full_like(counter, step),
        np.full_like(counter, purpose),
    )
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (b >> 32) ^ c1 ^ np.uint64(k0),
            b & 0xFFFFFFFF,
            (a >> 32) ^ c3 ^ np.uint64(k1),
            a & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], 1).reshape(-1)[:n].astype(np.uint32)


def dropout_factors(
    step_key: list[int], rows: int, channels: int, site: int, p: float
) -> torch.Tensor:
    """Return what dropout of p multiplies with at this point, 0 or 1 / (1 - p), for the
    rows from step_key[3] on.
    """
    step, low, high, first_row = step_key
    words = philox(
        low | high << 32,
        first_row * channels // 2,
        rows * channels // 2,
        step,
        DROPOUT + 256 * site,
    )
    # an element takes half a word, the lower half first
    kept = words.view(np.uint16) >= round(p * 65536)
    return torch.from_numpy(kept.reshape(rows, channels) / (1 - round(p * 65536) / 65536))
