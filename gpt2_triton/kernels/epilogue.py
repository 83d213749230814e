"""What follows a product before its tiles are stored; the kernels of products know it by name."""

from typing import Any, NamedTuple

from torch import Tensor

from gpt2_triton.operands import Rope


class RopeArguments(NamedTuple):
    """What kernels take of a Rope: pointers and numbers."""

    table: Any = None
    T: int = 1
    columns: int = 0
    w: Any = None  # of the norm, if there is one
    rstd: Any = None
    NH: int = 0
    eps: float = 0.0

    @classmethod
    def of(cls, rope: Rope | None) -> "RopeArguments":
        if rope is None:
            return cls()
        if rope.norm is None:
            return cls(*rope[:3])
        return cls(*rope[:3], rope.norm.w, rope.norm.rstd, rope.norm.NH, rope.norm.eps)

    @property
    def HS(self) -> int:
        """Columns of a head, 0 without a rotation."""
        return 0 if self.table is None else self.table.shape[1]


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
