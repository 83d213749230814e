"""GPT-2's parameters and the activations of its layers; tables.py has the other
buffers, and the symbols.
"""

import dataclasses

from torch import Tensor

from gpt2_triton.model.arena import buf
from gpt2_triton.model.fp8_table import Fp8Operands
from gpt2_triton.model.tables import HeadActs, Tensors, param


# fmt: off
@dataclasses.dataclass
class Params:
    """Parameters; weights are [out, in].  Weight decay applies to all before
    `rest` in the flat order.
    """

    #                        shape        group    init        matrices
    # also the output head; rows V..Vp stay zero
    wte:      Tensor  = param("Vp C",   "embed", "normal")
    wpe:      Tensor  = param("Tmax C", "embed", "normal")
    qkvw:     Tensors = param("D C",    "layer", "normal",   "C C, C C, C C")
    attprojw: Tensors = param("C C",    "layer", "residual")
    fcw:      Tensors = param("G C",    "layer", "normal")
    fcprojw:  Tensors = param("C F",    "layer", "residual")
    lnw:      Tensor  = param("S C",    "rest",  "one")
    lnb:      Tensor  = param("S C",    "rest",  "zero")
    qkvb:     Tensor  = param("L D",    "rest",  "zero")
    attprojb: Tensor  = param("L C",    "rest",  "zero")
    fcb:      Tensor  = param("L G",    "rest",  "zero")
    fcprojb:  Tensor  = param("L C",    "rest",  "zero")


@dataclasses.dataclass
class LayerActs:
    """Activations of the layers and their gradients.  From level `drop` on, layers share a copy."""

    # residual stream
    x:       Tensors = buf("S | R C",    "act", "embed..block_bwd", "activations", drop="block:odd")
    ln:      Tensors = buf("2*L | R C",  "act", "block..block_bwd", "activations",
                           drop="gelu+ln", when="bf16")
    mean:    Tensors = buf("S | R",      "f32", "block..block_bwd", "activations")
    rstd:    Tensors = buf("S | R",      "f32", "block..block_bwd", "activations")
    qkv:     Tensors = buf("L | R D",    "act", "block..block_bwd", "activations",
                           drop="gelu+ln+qkv")
    # log2 of sums of exp
    lse:     Tensors = buf("L | B NH T", "f32", "block..block_bwd", "activations", drop="block")
    att:     Tensors = buf("L | R C",    "act", "block..block_bwd", "activations", drop="block")
    # before and after GELU
    fch:     Tensors = buf("L | R G",    "act", "block..block_bwd", "activations",
                           drop="block", when="bf16")
    fcg:     Tensors = buf("L | R F",    "act", "block..block_bwd", "activations",
                           drop="gelu", again="block",
                           when="bf16")
    # dx[i], odd i: view.py
    dmid:    Tensor  = buf("R C",        "act", "block_bwd",        "backward",    when="bf16")
    datt:    Tensor  = buf("R C",        "act", "block_bwd",        "backward",    within="dln")
    dfch:    Tensors = buf("L | R G",    "act", "block_bwd",        "backward",
                           when="bf16", one_copy=True)
    dqkv:    Tensors = buf("L | R D",    "act", "block_bwd",        "backward",
                           when="bf16", one_copy=True,
                           within="dfch")


@dataclasses.dataclass
class Acts(HeadActs, LayerActs):
    """All activations; the layers' come first in the plan."""


@dataclasses.dataclass
class Fp8Buffers(Fp8Operands):
    """Operands in fp8, and gelu' as bytes."""

    slope: Tensors = buf("L | R G", "u8", "block..block_bwd", "activations", drop="block")
# fmt: on
