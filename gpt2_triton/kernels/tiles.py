"""Tiles of the persistent products: their order, their halves for the epilogue, and the split of dW's long sums."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_K_PARTS = 32
# Times in steps; a step of 128 x 256 x 64 takes an H200 0.75 us at 700 TFLOP/s.
IDLE_STEPS = 6  # start and end of a tile, when nothing is multiplied
PARTIALS_PER_STEP = 10  # partial sums read and added in the time of a step


@triton.jit
def tile_position(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return a tile's row and column of tiles.  Bands of GROUP_M rows of tiles are walked column by column, so that
    tiles in flight together share operands in L2.
    """
    band = GROUP_M * tiles_n
    first = tile // band * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return first + tile % band % height, tile % band // height


@triton.jit
def tile_corner(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the first row and column of a tile of a matrix [M, N]."""
    tile_m, tile_n = tile_position(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def halves(tile):
    """Return the left and the right half of a tile: stored one after the other, they need half the shared memory."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


class TileSplit(NamedTuple):
    """The items into which dW is divided: `whole_tiles` of `steps` steps each, then `split_tiles`, each in
    `k_parts` of `part_steps` steps.  A tile is `rows` x `columns` of dW: BLOCK_M x BLOCK_N or, where fewer tiles cover
    dW so, BLOCK_N x BLOCK_M.
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
    split.  WAVE, the items that run at once, is a number of the table and not of the GPU at hand: the same sizes are
    summed in the same order everywhere.
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


@triton.jit
def split_item(item, whole_tiles, split_tiles, steps, part_steps):
    """Return an item's tile, its first step, its number of steps and its slot: the place of its partial sum in scratch,
    or -1 for a whole tile.  Parts of the same rows follow one another and share them in L2.
    """
    slot = item - whole_tiles
    tile, first, count = item, 0, steps
    if slot >= 0:
        tile, first, count = whole_tiles + slot % split_tiles, slot // split_tiles * part_steps, part_steps
    else:
        slot = -1
    return tile, first, count, slot


def describe(tensor: Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    """Return TMA's view of a matrix in blocks of rows x columns."""
    return None if tensor is None else TensorDescriptor.from_tensor(tensor, [rows, columns])
