"""Tiles of the persistent products: their order, their halves, and the items of
dW, whole tiles or parts.
"""

import triton
import triton.language as tl


@triton.jit
def tile_position(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return a tile's place.  Bands of GROUP_M rows of tiles go column by
    column, to share operands in L2.
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
def walk(program, tiles, programs, BY_TMA: tl.constexpr):
    """Return first, end and step of a loop over the tiles of a program, and the offset from its
    index to a tile's number.

    With TMA a program walks tiles: the loads of a tile run beside the epilogue of the tile before.
    Without it a program has one tile, and programs that share a multiprocessor run beside each
    other.  The loop then vanishes: else Triton would compute all addresses before it, and keep
    those of the epilogue in registers that the product needs.
    """
    offset = 0
    if not BY_TMA:
        offset = program
        program = 0
        tiles = 1
        programs = 1
    return program, tiles, programs, offset


@triton.jit
def halves(tile):
    """Return the left and the right half of a tile: stored one after the other, they
    need half the shared memory.
    """
    sides = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(sides, (0, 2, 1)))


@triton.jit
def joined(left, right):
    """Return the tile of these halves."""
    sides = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(sides, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def split_item(item, whole_tiles, split_tiles, steps, part_steps):
    """Return an item's tile, first step, number of steps and slot: the place of the
    partial sum in scratch, or -1 for a whole tile.  Items that sum the same rows follow
    one another and share the rows in L2.
    """
    slot = item - whole_tiles
    tile = item
    first = 0
    count = steps
    if slot >= 0:
        tile = whole_tiles + slot % split_tiles
        first = slot // split_tiles * part_steps
        count = part_steps
    else:
        slot = -1
    return tile, first, count, slot
