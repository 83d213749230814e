"""How the persistent products walk their output tiles, and cut one for the epilogue: device functions."""

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
