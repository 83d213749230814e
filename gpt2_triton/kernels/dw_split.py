"""The split of dW's long sums into items, whole tiles or parts of a tile's sum, that fill a GPU."""

from typing import NamedTuple

import triton

MAX_K_PARTS = 32
# Times are in steps.  A step multiplies 128 x 256 x 64, in 0.75 us at 700 TFLOP/s.
IDLE_STEPS = 6  # start and end of a tile, when nothing is multiplied
PARTIALS_PER_STEP = 10  # partial sums read and added in the time of a step


class TileSplit(NamedTuple):
    """The items of dW: `whole_tiles` of `steps` steps each, then `split_tiles` in `k_parts` of `part_steps` steps each.

    A tile is `rows` x `columns` of dW: BLOCK_M x BLOCK_N, or turned if fewer turned tiles cover dW.
    """

    rows: int
    columns: int
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
        return self.split_tiles * self.k_parts * self.rows * self.columns


def time_in_steps(whole_tiles: int, split_tiles: int, k_parts: int, steps: int, wave: int) -> float:
    """Return the estimated time of these tiles on a GPU that runs `wave` items at once."""
    partials = split_tiles * k_parts
    whole_time = triton.cdiv(whole_tiles, wave) * (steps + IDLE_STEPS)
    split_time = triton.cdiv(partials, wave) * (triton.cdiv(steps, k_parts) + IDLE_STEPS)
    return whole_time + split_time + partials / PARTIALS_PER_STEP


def split_tiles(N: int, K: int, R: int, row: dict[str, int]) -> TileSplit:
    """Return the split that takes the least time for dW[N, K], a sum over R.  Tiles that fill whole waves are never
    split.  WAVE, the number of items that run at once, comes from the table, not from the GPU at hand.  So the same
    sizes are summed in the same order everywhere.
    """
    rows, columns = row["BLOCK_M"], row["BLOCK_N"]
    tiles, turned = (triton.cdiv(N, r) * triton.cdiv(K, c) for r, c in ((rows, columns), (columns, rows)))
    if turned < tiles:
        rows, columns, tiles = columns, rows, turned
    steps, wave = triton.cdiv(R, row["BLOCK_K"]), row["WAVE"]
    unsplit = TileSplit(rows, columns, tiles, 0, 1, steps, steps)
    whole = tiles // wave * wave
    if whole == tiles:
        return unsplit

    def time(k_parts: int) -> float:
        return time_in_steps(whole, tiles - whole, k_parts, steps, wave)

    k_parts = min(range(2, MAX_K_PARTS + 1), key=time)
    if time_in_steps(tiles, 0, 1, steps, wave) <= time(k_parts):
        return unsplit
    part_steps = triton.cdiv(steps, k_parts)
    return TileSplit(rows, columns, whole, tiles - whole, triton.cdiv(steps, part_steps), steps, part_steps)
