"""How the persistent products share out their output tiles, walk them, and cut one for the epilogue."""

from typing import NamedTuple

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Bands of GROUP_M rows of tiles, each walked column by column: tiles in flight together share operands in L2."""
    band = GROUP_M * tiles_n
    first = tile // band * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return first + tile % band % height, tile % band // height


@triton.jit
def halves(tile):
    """The left and the right half of a tile: stored one after the other, they need half the shared memory."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def quarters(tile):
    """From left to right."""
    left, right = halves(tile)
    first, second = halves(left)
    third, fourth = halves(right)
    return first, second, third, fourth


class Cut(NamedTuple):
    """How dW is shared out: `whole` tiles of all `steps` steps, and `rest` tiles in `pieces` of `piece_steps` each.  A
    tile is `rows` x `columns` of dW: BLOCK_M x BLOCK_N or, where fewer cover dW so, BLOCK_N x BLOCK_M.
    """

    rows: int
    columns: int
    whole: int
    rest: int
    pieces: int
    steps: int
    piece_steps: int


def cut_tiles(N: int, K: int, R: int, row: dict[str, int]) -> Cut:
    """The cut that takes the least time on a GPU that runs WAVE tiles at once; the unit is a step.

    A 128x256x64 step takes an H200 0.75 us at 700 TFLOP/s.  By that measure a tile's start and end, when nothing is
    multiplied, are taken for 6 steps, and reading and adding a piece for 1/10.  WAVE is a number of the table and not
    of the GPU at hand: the same sizes are summed in the same order everywhere.
    """
    block_m, block_n = row["BLOCK_M"], row["BLOCK_N"]
    upright, turned = (triton.cdiv(N, r) * triton.cdiv(K, c) for r, c in ((block_m, block_n), (block_n, block_m)))
    rows, columns = (block_n, block_m) if turned < upright else (block_m, block_n)
    tiles = min(upright, turned)
    steps, wave = triton.cdiv(R, row["BLOCK_K"]), row["WAVE"]

    def cost(cut: tuple[int, int]) -> float:
        whole, pieces = cut
        rest = (tiles - whole) * pieces
        waves = triton.cdiv(whole, wave) * (steps + 6)
        return waves + triton.cdiv(rest, wave) * (triton.cdiv(steps, pieces) + 6) + rest / 10

    full = tiles // wave * wave
    whole, pieces = min([(tiles, 1), *((full, p) for p in range(2, 33) if full < tiles)], key=cost)
    piece_steps = triton.cdiv(steps, pieces)
    return Cut(rows, columns, whole, tiles - whole, triton.cdiv(steps, piece_steps), steps, piece_steps)
