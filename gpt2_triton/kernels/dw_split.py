"""The split of dW's long sums into items, whole tiles or parts of a tile's sum, that fill a GPU."""

import math
from collections.abc import Sequence
from typing import NamedTuple

MAX_K_PARTS = 32
# Times are in steps.  A step multiplies 128 x 256 x 64, in 0.75 us at 700 TFLOP/s.
IDLE_STEPS = 6  # start and end of a tile, when nothing is multiplied
PARTIALS_PER_STEP = 10  # partial sums read and added in the time of a step


class Grid(NamedTuple):
    """The tiles of one dW, `rows` x `columns`: BLOCK_M x BLOCK_N, or turned if
    fewer turned tiles cover dW.
    """

    rows: int
    columns: int
    first: int  # tile, after those of the matrices before it
    tiles: int


class TileSplit(NamedTuple):
    """The items of some dW: tiles of `steps` steps each, then `k_parts`
    parts of each split tile.
    """

    grids: list[Grid]
    whole_tiles: int
    split_tiles: int
    k_parts: int
    steps: int
    part_steps: int

    @property
    def items(self) -> int:
        return self.whole_tiles + self.split_tiles * self.k_parts

    @property
    def scratch(self) -> int:
        """Return the fp32 elements of all partial sums."""
        return self.split_tiles * self.k_parts * self.grids[0].rows * self.grids[0].columns


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up; a plan calls it 100,000 times, and triton.cdiv is slow."""
    return -(-x // y)


def time_in_steps(whole_tiles: int, split_tiles: int, k_parts: int, steps: int, wave: int) -> float:
    """Return the estimated time of these tiles on a GPU that runs `wave` items at once."""
    partials = split_tiles * k_parts
    whole_time = cdiv(whole_tiles, wave) * (steps + IDLE_STEPS)
    split_time = cdiv(partials, wave) * (cdiv(steps, k_parts) + IDLE_STEPS)
    return whole_time + split_time + partials / PARTIALS_PER_STEP


def split_tiles(
    sizes: Sequence[Sequence[int]], R: int, row: dict[str, int], sms: int, room: float = math.inf
) -> TileSplit:
    """Return the split that takes the least time for matrices dW[N, K], sums over R, on a GPU
    of `sms` multiprocessors.  Its partial sums are at most `room` elements.  Tiles that fill
    whole waves are never split.
    """
    grids, tiles = [], 0
    for N, K in sizes:
        shapes = (row["BLOCK_M"], row["BLOCK_N"]), (row["BLOCK_N"], row["BLOCK_M"])
        covers = [Grid(*shape, tiles, cdiv(N, shape[0]) * cdiv(K, shape[1])) for shape in shapes]
        grids.append(min(covers, key=lambda grid: grid.tiles))
        tiles += grids[-1].tiles
    steps = cdiv(R, row["BLOCK_K"])
    wave = sms * row["PER_SM"]
    unsplit = TileSplit(grids, tiles, 0, 1, steps, steps)
    whole = tiles // wave * wave
    if whole == tiles:
        return unsplit

    best = unsplit
    least = time_in_steps(tiles, 0, 1, steps, wave)
    for k_parts in range(2, MAX_K_PARTS + 1):
        part_steps = cdiv(steps, k_parts)
        split = TileSplit(grids, whole, tiles - whole, cdiv(steps, part_steps), steps, part_steps)
        time = time_in_steps(whole, tiles - whole, k_parts, steps, wave)
        if time < least and split.scratch <= room:
            best, least = split, time
    return best
