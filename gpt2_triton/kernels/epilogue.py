"""What follows a product before its tiles are stored; the kernels of products know it by name."""

from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from gpt2_triton.operands import Rope


class RopeArguments(NamedTuple):
    """What kernels take of a Rope: pointers and numbers."""

    HS: tl.constexpr = tl.constexpr(0)  # columns of a head, 0 without a rotation
    table: Any = None
    T: int = 1  # tokens of a sequence
    columns: int = 0  # to rotate, the first ones
    w: Any = None  # of the norm, [2, HS]; None without, and then the next three are not read
    rstd: Any = None  # [rows, heads]
    NH: int = 0  # heads of q
    eps: float = 0.0

    @classmethod
    def of(cls, rope: Rope | None) -> "RopeArguments":
        if rope is None:
            return cls()
        HS = tl.constexpr(rope.table.shape[1])
        if rope.norm is None:
            return cls(HS, *rope[:3])
        return cls(HS, *rope[:3], rope.norm.w, rope.norm.rstd, rope.norm.NH, rope.norm.eps)


NO_ROPE = RopeArguments()


class Epilogue(NamedTuple):
    """An operation, and the tensors that it reads and writes; matmul.py explains them."""

    # "add", "rope", "swiglu"; "act" or "dact", in kernels that know GELU alone "gelu" or "dgelu"
    name: str = ""
    b: Tensor | None = None
    res: Tensor | None = None
    pre: Tensor | None = None  # in fp8 bytes of gelu'
    act_out: Tensor | None = None
    part: Tensor | None = None
    rope: Rope | None = None

    @property
    def op(self) -> str:
        """Return the name of a product that ends with it, as hopper.takes knows it."""
        return f"matmul_{self.name}".removesuffix("_")
