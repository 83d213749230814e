"""Operands in fp8: full of NaN, or of given numbers; read bit by bit, or in float64."""

from typing import Any

import torch
from torch import Tensor

from gpt2_triton.kernels.e4m3 import AMAX_CELLS
from gpt2_triton.operands import Fp8
from tests.conftest import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return x rounded by torch, which does not saturate."""
    most = torch.finfo(dtype).max
    return torch.where(x.isnan(), x, x.clamp(-most, most)).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def in_pairs(x: Tensor) -> Tensor:
    """Return x [R, C] of 8-bit floats transposed, as bytes; each 16 rows in
    the order 0 8 1 9 ... 7 15.
    """
    order = torch.arange(len(x)).view(-1, 2, 8).transpose(1, 2).flatten()
    return bits(x)[order].T.contiguous()


def unwritten(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Return NaNs, so that an element that a kernel does not write shows."""
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(dtype)


def amax_cells() -> Tensor:
    return torch.zeros(AMAX_CELLS, dtype=torch.int32, device=DEVICE)


def operand(
    rows: int, columns: int, scale: float = 1.0, transposed: bool = True, value: Any = None,
    dtype: torch.dtype = E4M3,
) -> Fp8:  # fmt: skip
    """Return an operand full of NaN, or with the rows and columns of `value`."""
    x8, x8t = unwritten(rows, columns, dtype=dtype), unwritten(columns, rows, dtype=dtype)
    out = Fp8(x8, x8t, torch.tensor([scale], device=DEVICE), amax_cells(), transposed)
    if value is not None:
        out.rows.copy_(rounded(value * scale))
        out.columns.copy_(in_pairs(out.rows).view(dtype) if transposed else out.columns)
    return out


def dequantised(x: Fp8) -> Tensor:
    return x.rows.double() / x.scale.double()


def amax_of(x: Fp8) -> float:
    return x.amax.view(torch.float32).max().item()
