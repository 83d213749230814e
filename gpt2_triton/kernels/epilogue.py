"""What follows a product before its tiles are stored; the kernels of products know it by name."""

from typing import NamedTuple

from torch import Tensor

from gpt2_triton.operands import Rope

NO_ROPE = (None, 1, 0)  # in the place of a Rope


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
