"""The schedule's view of a model: the buffers cut for one batch shape, and
the constants of the run.  view.py makes it.
"""

import dataclasses
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from gpt2_triton.model.communicator import Communicator
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.muon import MatrixClass
from gpt2_triton.model.recompute import Recompute
from gpt2_triton.model.tables import HeadActs, State, Tensors
from gpt2_triton.operands import (
    UNUSED,
    Betas,
    Branch,
    Dropout,
    Fp8,
    Linear,
    Matrices,
    Norm,
    Operand,
    Rope,
    Span,
    Step,
    Targets,
    TokenRows,
)

WeightsT = TypeVar("WeightsT", covariant=True)  # Params of the architecture
ActsT = TypeVar("ActsT", bound=HeadActs, covariant=True)  # its Acts
OperandsT = TypeVar("OperandsT")  # its Fp8Buffers


class Observer:
    """Takes no statistics.  The schedule calls its methods."""

    def tensors(self, **entries: int) -> None:
        """Look at tensors just written: `entries` has their names in Acts or
        Params, and their indices.
        """

    def adamw(self, span: Span) -> None:
        """Look at a span before its update."""

    def muon(self, c: Matrices) -> None:
        """Look at matrices before their update."""


class Embedding(NamedTuple):
    """The tokens' vectors, and where GPT-2 has them the positions'."""

    wte: Operand
    wpe: Tensor | None
    dwte: Tensor  # with the rows of an untied head behind it
    dwpe: Tensor | None


class Layer(NamedTuple):
    """A layer's four products: their weights, biases and gradients."""

    qkv: Linear
    attproj: Linear
    fc: Linear
    fcproj: Linear
    rope: Rope = UNUSED  # Llama's


class Cut(NamedTuple, Generic[WeightsT, ActsT, OperandsT]):
    """What make_view has cut out of the arena for a model's wire()."""

    w: WeightsT
    g: WeightsT  # without memory in a model that only runs forward
    a: ActsT
    embed_g: Tensor  # the gradients of bucket `embed` as rows of C channels
    branch_grads: Tensors  # [i]: of the branch that ends at x[i]; in fp8 operands
    s: State
    dims: dict[str, int]
    dropout: float  # 0 in a view that does not train
    norm_eps: float
    q: OperandsT | None  # None in bf16


class Wiring(NamedTuple):
    """What the launches of a model's schedule take, layer by layer."""

    embedding: Embedding
    head: Linear  # its weights are wte, or of their own: untied
    norms: list[Norm]  # [i]: of x[i]
    branches: list[Branch]  # [i]: that ends at x[i]
    layers: list[Layer]
    dropouts: list[Dropout | None] = []  # [i]: of what joins the stream at x[i]; GPT-2's


@dataclasses.dataclass
class ModelView(Generic[WeightsT, ActsT]):
    """The schedule's view for B sequences of T tokens."""

    w: WeightsT
    g: WeightsT
    a: ActsT
    net: Wiring  # of the three, by the architecture's wire()
    s: State
    ids: Tensor
    targets: Targets
    tokens: TokenRows
    # [i]: the gradient of the branch that ends at x[i], an operand of products
    branch_grads: list[Operand]
    L: int
    NH: int
    activation: str  # of the MLP
    V: int
    head_chunks: list[slice]  # the rows that the head takes at a time
    recompute: list[Recompute]  # of each layer
    step: Step
    betas: Betas
    comm: Communicator  # to the other ranks
    norm_grads: list[Tensor]  # the gradients that this rank squares and sums for the norm
    updates: list[tuple[int, Span]]  # with the number of the span's first bucket
    matrices: list[MatrixClass]  # empty without Muon
    fp8: bool  # some operands are in fp8
    fp8_weights: list[list[Fp8]]  # of each layer, then the head's
    fp8_again: list[list[Fp8]]  # fp8 weights of each layer that the backward pass casts again
    # ZeRO-2: a layer's gradients are sent in each micro-step and not kept until the next
    grads_sharded: bool
    observe: Observer  # takes statistics in the training steps that log.stats_every selects


class Layers(Protocol):
    """The schedule of a model's layers: the module gpt2/schedule.py or llama/schedule.py."""

    def embed(self, K: Kernels, m: ModelView) -> None: ...
    def layer(self, K: Kernels, m: ModelView, l: int) -> None: ...
    def last_product(self, K: Kernels, m: ModelView, l: int) -> None: ...
    def block_bwd(self, K: Kernels, m: ModelView, acc: bool) -> None: ...
    def decode_mlp(self, K: Kernels, m: ModelView, l: int) -> None: ...
