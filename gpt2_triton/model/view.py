"""What the schedule sees of a model."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from gpt2_triton.model.buffers import Acts, Params, Recompute, State
from gpt2_triton.model.communicator import Communicator


class Update(NamedTuple):
    """A stretch of the flat buffers that AdamW takes at once; `first` is its flat index."""

    bucket: int
    w: Tensor
    m: Tensor
    v: Tensor
    low: Tensor | None
    g: Tensor
    first: int
    decay: float


@dataclasses.dataclass
class View:
    """What the schedule sees: the buffers cut for one (B, T), and the constants of the run."""

    w: Params
    g: Params | None
    a: Acts
    s: State
    ids: Tensor
    targets: Tensor
    order: Tensor
    segments: Tensor
    hot: Tensor
    gb: list[Tensor | None]
    L: int
    NH: int
    V: int
    T: int
    R: int
    Rc: int
    recompute: list[Recompute]  # of each layer
    betas_eps: tuple[float, float, float]
    comm: Communicator
    squared: list[Tensor]  # the gradients whose squares this rank adds up
    updates: list[Update]
    grads_leave: bool  # ZeRO-2: a layer's gradients are not kept from one micro-step to the next

    def head_chunks(self) -> Iterator[slice]:
        for start in range(0, self.R, self.Rc):
            yield slice(start, min(start + self.Rc, self.R))
