"""The schedule's view of a model: the buffers cut for one batch shape, and
the constants of the run.  view.py makes it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from gpt2_triton.model.communicator import Communicator
from gpt2_triton.model.muon import MatrixClass
from gpt2_triton.model.tables import Recompute, State
from gpt2_triton.operands import Fp8, TokenRows


class UpdateSpan(NamedTuple):
    """A span of the flat buffers that one AdamW launch updates; `first` is its flat index."""

    bucket: int
    w: Tensor
    m: Tensor
    v: Tensor
    low: Tensor | None  # of fp32 masters
    g: Tensor
    first: int
    decay: float
    lr_factor: float


class Observer:
    """Takes no statistics.  The schedule calls its methods."""

    def tensors(self, **entries: int) -> None:
        """Look at tensors just written: `entries` has their names in Acts or
        Params, and their indices.
        """

    def adamw(self, span: UpdateSpan) -> None:
        """Look at an UpdateSpan before its update."""

    def muon(self, matrices: MatrixClass) -> None:
        """Look at a MatrixClass before its update."""


@dataclasses.dataclass
class ModelView:
    """The schedule's view for B sequences of T tokens."""

    w: Any  # Params of the architecture
    g: Any
    head_w: Any  # the output head: w.wte, or w.lmhead of an untied one
    head_g: Any
    # the gradients of bucket `embed` as rows: Llama's wte, and lmhead behind it
    embed_g: Tensor  # None in a model that only runs forward
    a: Any  # its Acts
    s: State
    ids: Tensor
    targets: Tensor
    tokens: TokenRows
    # [i]: the gradient of the branch that ends at x[i], an operand of products
    branch_grads: list[Any]
    branch_bias_grads: list[Tensor | None]  # [i]: the bias gradient of this branch
    dropout: float  # 0 in a view that does not train
    L: int
    NH: int
    activation: str  # of the MLP
    norm_eps: float
    rotated_columns: int  # of qkv, in a model with rotary positions
    V: int
    T: int
    R: int
    Rc: int
    recompute: list[Recompute]  # of each layer
    betas_eps: tuple[float, float, float]
    comm: Communicator  # to the other ranks
    norm_grads: list[Tensor]  # the gradients that this rank squares and sums for the norm
    updates: list[UpdateSpan]
    matrices: list[MatrixClass]  # empty without Muon
    fp8: bool  # some operands are in fp8
    fp8_weights: list[list[Fp8]]  # of each layer, then the head's
    fp8_again: list[list[Fp8]]  # fp8 weights of each layer that the backward pass casts again
    # ZeRO-2: a layer's gradients are sent in each micro-step and not kept until the next
    grads_sharded: bool
    observe: Observer  # takes statistics in the training steps that log.stats_every selects

    def head_chunks(self) -> Iterator[slice]:
        for start in range(0, self.R, self.Rc):
            yield slice(start, min(start + self.Rc, self.R))
