"""Blocks of tensors in global memory: loaded and stored by TMA, or by
pointers on a GPU without TMA.

Products and attention take described tensors: `describe` is called by launchers, the other
functions by kernels.  TMA reads zeros and writes nothing outside a tensor.  Where there is no TMA,
Triton would rewrite a descriptor to pointers whose alignment it does not know, and so load two
bytes at a time.  A Pointers keeps what Triton can know: sizes that are multiples of 16, the last
stride 1, and the dimensions that are whole blocks, which need no mask.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2_triton.kernels import tuning


class Pointers(NamedTuple):
    """A tensor in blocks, with the fields of a TensorDescriptor, and two more."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[tl.constexpr, ...]
    whole: tuple[tl.constexpr, ...]  # dimensions that are whole blocks: no block may reach outside
    # the dimension of a block's rows; the last has its columns, in the others a block is one long
    row: tl.constexpr


Blocks = TensorDescriptor | Pointers
INTERPRETED = tl.constexpr(tuning.INTERPRET)


def describe(
    tensor: Tensor | None, *block_shape: int, reach: Sequence[int] | None = None
) -> Blocks | None:
    """Return a tensor in blocks of this shape, which has two dimensions longer
    than 1, for the functions below.

    reach   for each dimension: no block passes the first multiple of this at or after the tensor's
            end; by default of the block's length, as where blocks lie side by side
    """
    if tensor is None:
        return None
    if tuning.has_tma():
        return TensorDescriptor.from_tensor(tensor, [*block_shape])
    block = tuple(tl.constexpr(n) for n in block_shape)
    whole = tuple(
        tl.constexpr(size % n == 0)
        for size, n in zip(tensor.shape, reach or block_shape, strict=True)
    )
    row = next(dimension for dimension, n in enumerate(block_shape) if n > 1)
    return Pointers(tensor, tuple(tensor.shape), tensor.stride(), block, whole, tl.constexpr(row))


def describe_halves(tensor: Tensor | None, *tile: int) -> Blocks | None:
    """Return a tensor in blocks that are the left or the right half of a tile."""
    *rows, columns = tile
    return describe(tensor, *rows, columns // 2, reach=tile)


@triton.jit
def copies_ahead(x):
    """Return whether Triton copies the blocks of a loop ahead by cp.async; constant."""
    if isinstance(x, tl.tensor_descriptor):
        ahead: tl.constexpr = False
    else:
        ahead: tl.constexpr = INTERPRETED or is_cuda()
    return ahead


@triton.jit
def _inside(first, SIZE: tl.constexpr, end, WHOLE: tl.constexpr):
    """Return which elements of a block's dimension are in the tensor; a constant needs no mask."""
    if WHOLE:
        tl.device_assert(end >= first + SIZE, "a block reaches out of a tensor of whole blocks")
        inside = tl.full((SIZE,), True, tl.int1)
    else:
        inside = first + tl.arange(0, SIZE) < end
    return inside


@triton.jit
def _places(x, at, TRANSPOSED: tl.constexpr, REPEAT: tl.constexpr):
    """Return pointers to the elements of a block, and which of them are inside the tensor; with
    REPEAT a row past the end is the last row.
    """
    row: tl.constexpr = x.row
    column: tl.constexpr = len(at) - 1
    first = x.base
    for dimension in tl.static_range(column):
        first += tl.cast(at[dimension], tl.int64) * x.strides[dimension]
    # 32 bits suffice inside a block and along a row: a loop over a row's blocks adds
    # one such number to each pointer
    offsets = tl.arange(0, x.block_shape[row])
    if REPEAT and not x.whole[row]:
        offsets = tl.minimum(offsets, x.shape[row] - 1 - at[row])
        inside_rows = tl.full((x.block_shape[row],), True, tl.int1)
    else:
        inside_rows = _inside(at[row], x.block_shape[row], x.shape[row], x.whole[row])
    rows = first + offsets * x.strides[row]
    columns = at[column] + tl.arange(0, x.block_shape[column])
    inside_columns = _inside(at[column], x.block_shape[column], x.shape[column], x.whole[column])
    if TRANSPOSED:
        places = rows[None, :] + columns[:, None]
        inside = inside_rows[None, :] & inside_columns[:, None]
    else:
        places = rows[:, None] + columns[None, :]
        inside = inside_rows[:, None] & inside_columns[None, :]
    return places, inside


@triton.jit
def load_block(x, at, TRANSPOSED: tl.constexpr = False, REPEAT: tl.constexpr = False):
    """Return the block [rows, columns] that begins at the indices `at`;
    zeros outside the tensor.

    TRANSPOSED  return [columns, rows].  Pointers are transposed, not the block: the first operand
                of mma.sync would else not be loaded asynchronously
    REPEAT      rows past the tensor's end hold any of its rows, for the operand of a product that
                stores nothing there: masks would take time in the product's loop
    """
    if isinstance(x, tl.tensor_descriptor):
        block = x.load(at)
        block = block.reshape(block.numel // block.shape[-1], block.shape[-1])
        if TRANSPOSED:
            block = block.T
    else:
        places, inside = _places(x, at, TRANSPOSED, REPEAT)
        block = tl.load(places, mask=inside, other=0.0)
    return block


@triton.jit
def rounded(block, x):
    """Return a block in the dtype of a described tensor."""
    if isinstance(x, tl.tensor_descriptor):
        block = block.to(x.dtype)
    else:
        block = block.to(x.base.dtype.element_ty)
    return block


@triton.jit
def store_block(x, at, block):
    """Store a block [rows, columns], rounded to the tensor's dtype, at the indices `at`;
    nothing outside the tensor.
    """
    block = rounded(block, x)
    if isinstance(x, tl.tensor_descriptor):
        x.store(at, block.reshape(x.block_shape))
    else:
        places, inside = _places(x, at, False, False)
        tl.store(places, block, mask=inside)
