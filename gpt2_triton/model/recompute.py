"""Recomputation: what a layer's backward pass computes again, and so which layers share memory.

memory.recompute names a level of RECOMPUTE_LEVELS, from the level that keeps most to the level that
keeps least.  A buffer's `drop` is the first level at which layers share a copy of it.
"""

import dataclasses
from collections.abc import Sequence

from gpt2_triton.config.values import RECOMPUTE_LEVELS


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Says what a layer's backward pass computes again instead of
    reading, from memory.recompute.
    """

    gelu: bool
    # also the fp8 casts of weights and att; True at `block` too, where a layer's two norms share ln
    ln: bool
    qkv: bool
    block: bool

    @classmethod
    def at(cls, level: str, fp8: bool) -> "Recompute":
        """Return what a level computes again; in fp8 GELU's output is
        kept, and its input is not.
        """
        block = level == "block"
        parts = level.split("+")
        return cls(
            gelu="gelu" in parts and not fp8,
            ln="ln" in parts or block,
            qkv="qkv" in parts,
            block=block,
        )


def layer_levels(recompute: str, L: int) -> list[str]:
    """Return each layer's level.  LEVEL is for all; LEVEL:N is for the first N, and the
    level before it for the others.

    >>> layer_levels("gelu:1", 3)
    ['gelu', 'none', 'none']
    """
    level, _, first = recompute.partition(":")
    n = int(first or L)
    return [level] * n + [RECOMPUTE_LEVELS[RECOMPUTE_LEVELS.index(level) - 1]] * (L - n)


def meaning(recompute: str) -> str:
    """Return what a run's level does, in words."""
    if recompute == RECOMPUTE_LEVELS[0]:
        return "nothing is recomputed"
    return "the backward pass recomputes this, to fit the memory"


def _dropped(drop: str, levels: Sequence[str]) -> int:
    """Return how many layers have a level that is `drop` or deeper."""
    if not drop:
        return 0
    return sum(
        RECOMPUTE_LEVELS.index(level) >= RECOMPUTE_LEVELS.index(drop.partition(":")[0])
        for level in levels
    )


def phases(live: str, drop: str, again: str, levels: Sequence[str]) -> str:
    """Return the phases of a buffer: fewer than `live` if all layers share one copy.

    The backward pass writes that copy again from level `again` on, by default from `drop` on.
    """
    if not levels or drop.endswith(":odd") or _dropped(drop, levels) < len(levels):
        return live
    return "block block_bwd" if _dropped(again or drop, levels[:1]) else "block"


def copies(n: int, drop: str, levels: Sequence[str]) -> tuple[int, ...]:
    """Return the copy that each of a list's n entries uses.

    The first `dropped` layers use the copy of layer `dropped`; every other entry has its own copy.
    In the forward pass the dropped layers end before layer `dropped` writes.  In the backward pass
    layer `dropped` ends before they write.

    >>> copies(4, "gelu", layer_levels("gelu:2", 4))
    (0, 0, 0, 1)
    >>> copies(9, "block:odd", layer_levels("block:2", 4))  # x[1] and x[3] use the copy of x[5]
    (0, 3, 1, 3, 2, 3, 4, 5, 6)
    """
    dropped = _dropped(drop, levels)
    odd_only = drop.endswith(":odd")
    shared = 0
    if dropped:  # the first entry with a copy that others use
        shared = dropped * (n // len(levels)) + odd_only
    users = [shared if i < shared and (i % 2 or not odd_only) else i for i in range(n)]
    kept = {entry: copy for copy, entry in enumerate(sorted({*users}))}
    return tuple(kept[entry] for entry in users)
