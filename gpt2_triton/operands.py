"""What launchers take beside tensors: fp8 operands, and tuples of tensors that belong together.

Each model's wiring.py builds the tuples once, and the launchers of kernels/ read them.  The
contract of a launcher says which fields it reads and which it writes.
"""

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

NARROW_ROWS = 16  # the most rows whose norm decode_matmul takes too


@dataclasses.dataclass(frozen=True)
class Fp8:
    """An operand of products, [R, C], in the forms that products and other kernels read."""

    rows: Tensor  # e4m3 or e5m2 [R, C], or [0, C] if no product reads them
    columns: Tensor  # the same [C, R], or [0, C] if no product reads them
    scale: Tensor  # fp32 [1]
    amax: Tensor | None  # int32 [AMAX_CELLS], bits of fp32; None: not recorded
    # True: a kernel before matmul_dw writes `columns`; False: matmul_dw does, to a common buffer
    transposed: bool
    value: Tensor | None = None  # bf16 [R, C], for kernels that read it in full precision

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape if len(self.rows) else self.columns.shape[::-1]

    def dim(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self.rows.is_contiguous()

    def __getitem__(self, rows: slice) -> "Fp8":
        """Return some rows, with columns to be written: their order
        depends on the number of rows.
        """
        columns = self.columns
        n = len(range(*rows.indices(self.shape[0])))
        if len(columns):
            columns = columns.view(-1)[: n * len(columns)].view(-1, n)
        value = None if self.value is None else self.value[rows]
        return dataclasses.replace(self, rows=self.rows[rows], columns=columns, value=value)


Operand = Tensor | Fp8
UNUSED: Any = None  # in the place of a tensor that no launch of the tuple touches


class Norm(NamedTuple):
    """A LayerNorm of rows with C channels; an RMSNorm has neither b nor mean."""

    w: Tensor  # [C]
    b: Tensor | None = None
    mean: Tensor = UNUSED  # fp32 [R], of the forward pass
    rstd: Tensor = UNUSED
    dw: Tensor = UNUSED
    db: Tensor = UNUSED
    eps: float = 1e-5


class Linear(NamedTuple):
    """A linear layer, inp @ w.T + b; w is [out, in]."""

    w: Operand
    b: Tensor | None = None
    dw: Tensor = UNUSED
    db: Tensor = UNUSED


class Targets(NamedTuple):
    """The tokens that rows of the head predict (kernels/classifier.py)."""

    ids: Tensor  # int32 [R], -1 for none
    logits: Tensor  # fp32 [R], by classifier_target: log2(e) times their logits
    cap: float = 0.0  # soft cap of all logits; 0 for none

    def rows(self, rows: slice) -> "Targets":
        return Targets(self.ids[rows], self.logits[rows], self.cap)


class HeadNorm(NamedTuple):
    """The RMSNorm of the heads of q and k (kernels/qk_norm.py)."""

    w: Tensor  # [2, HS], of q's heads and of k's
    rstd: Tensor  # fp32 [R, heads of q and k], of the forward pass
    dw: Tensor
    NH: int  # heads of q
    eps: float


class Rope(NamedTuple):
    """Rotary positions (kernels/rope.py); row r of a batch is at position r % T."""

    table: Tensor  # fp32 [positions, HS], cosines and sines
    T: int
    columns: int  # that are rotated, the first ones: the heads of q and k
    norm: HeadNorm | None = None  # before the rotation


class Dropout(NamedTuple):
    """Dropout, with probability p, of what joins the residual stream at point i."""

    step_key: Tensor
    i: int
    p: float


class Branch(NamedTuple):
    """What the backward pass writes for the branch that ends at a point of the residual stream."""

    db: Tensor | None = None  # gradient of its bias; None at x[0], where no branch ends
    dout: Tensor | None = None  # gradient of its output; None: that is dx, or dx in fp8
    dropout: Dropout | None = None


class TokenRows(NamedTuple):
    """The rows of activations that belong to each token of a batch; data/packing.py packs them."""

    order: Tensor  # int32 [2 * R]
    segments: Tensor  # int32 [Ns, 4]
    split_tokens: Tensor  # int32 [Nh, 4]
    T: int  # tokens of a sequence


class Step(NamedTuple):
    """A step's results, its inputs, and the key of its noise; step_io.py names the elements."""

    out: Tensor
    inp: Tensor
    key: Tensor


class Span(NamedTuple):
    """A span of the flat buffers that one launch of AdamW updates."""

    w: Tensor
    m: Tensor
    v: Tensor
    low: Tensor | None  # of fp32 masters
    g: Tensor
    first: int  # flat index of w[0], a multiple of 4
    lr_factor: float
    decay: float

    def part(self, r: slice) -> "Span":
        """Return some elements, to be read."""
        return self._replace(w=self.w[r], m=self.m[r], v=self.v[r], g=self.g[r], low=None)


class Matrices(NamedTuple):
    """The same n elements of each layer's matrices of one shape, which a launch of Muon updates."""

    w: Tensor = UNUSED  # [L, n], with any stride between layers; so are all five
    low: Tensor | None = None  # of fp32 masters
    m: Tensor = UNUSED
    g: Tensor = UNUSED
    x: Tensor = UNUSED  # the update: momentum, then nearly orthogonal
    first: int = 0  # flat index of w[0, 0]
    distance: int = 0  # from it to w[1, 0]'s flat index
    momentum: float = 0.0
    decay: float = 0.0
    scale: float = 1.0  # factor on the orthogonalised x

    def part(self, layer: int, r: slice) -> "Matrices":
        """Return some elements of a layer, to be read."""
        at = layer, r
        return self._replace(w=self.w[at], g=self.g[at], x=self.x[at], low=None, m=UNUSED)


class Betas(NamedTuple):
    """The constants of AdamW."""

    beta1: float
    beta2: float
    eps: float
