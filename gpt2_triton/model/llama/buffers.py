"""Llama 3's parameters and the activations of its layers; tables.py has the other
buffers, and the symbols.
"""

import dataclasses

from torch import Tensor

from gpt2_triton.model.arena import buf
from gpt2_triton.model.tables import HeadActs, Tensors, param


# fmt: off
@dataclasses.dataclass
class Params:
    """Parameters; weights are [out, in].  qkvw has rows of q, k, v; fcw of gate, value."""

    #                        shape     group    init        matrices
    wte:      Tensor  = param("Vp C", "embed", "normal")  # rows V..Vp stay zero
    qkvw:     Tensors = param("D C",  "layer", "normal",   "Cq C, Ckv C, Ckv C")
    attprojw: Tensors = param("C Cq", "layer", "residual")
    fcw:      Tensors = param("G C",  "layer", "normal",   "F C, F C")
    fcprojw:  Tensors = param("C F",  "layer", "residual")
    lnw:      Tensor  = param("S C",  "rest",  "one")
    # of the norms of q's heads, and of k's
    qknormw:  Tensor  = param("L 2 Hn", "rest", "one")


@dataclasses.dataclass
class UntiedParams(Params):
    """Parameters of a model whose output head is not wte; the head lies directly behind it."""

    lmhead:   Tensor  = param("Vp C", "embed", "normal")


@dataclasses.dataclass
class LayerActs:
    """Activations of the layers and their gradients.  `drop` is as in GPT-2's table."""

    # residual stream
    x:    Tensors = buf("S | R C",    "act", "embed..block_bwd", "activations", drop="block:odd")
    ln:   Tensors = buf("2*L | R C",  "act", "block..block_bwd", "activations",
                        drop="gelu+ln", when="bf16")
    rstd: Tensors = buf("S | R",      "f32", "block..block_bwd", "activations")
    # q and k normed, if model.qk_norm, and rotated
    qkv:  Tensors = buf("L | R D",    "act", "block..block_bwd", "activations", drop="gelu+ln+qkv")
    # of the norms of q's and k's heads
    qkrstd: Tensors = buf("L | R Qn", "f32", "block..block_bwd", "activations", drop="gelu+ln+qkv")
    # log2 of row sums
    lse:  Tensors = buf("L | B NH T", "f32", "block..block_bwd", "activations", drop="block")
    att:  Tensors = buf("L | R Cq",   "act", "block..block_bwd", "activations", drop="block")
    # gate, value
    fch:  Tensors = buf("L | R G",    "act", "block..block_bwd", "activations", drop="block")
    fcg:  Tensors = buf("L | R F",    "act", "block..block_bwd", "activations",
                        drop="gelu", when="bf16")
    # dx for an odd i
    dmid: Tensor  = buf("R C",        "act", "block_bwd",        "backward",    when="bf16")
    datt: Tensor  = buf("R Cq",       "act", "block_bwd",        "backward",    within="dfcg")
    # takes the place of what it is the gradient of
    dfch: Tensors = buf("L | R G",    "act", "block_bwd",        "backward",
                        drop="block", when="bf16", within="fch")
    dfcg: Tensor  = buf("R F",        "act", "block_bwd",        "backward")
    dqkv: Tensors = buf("L | R D",    "act", "block_bwd",        "backward",
                        when="bf16", one_copy=True)
    # cosines and sines of Tr positions: rope.py
    rope: Tensor  = buf("Tr HS",      "f32", "embed..between",   "inputs")


@dataclasses.dataclass
class Acts(HeadActs, LayerActs):
    """All activations; the layers' come first in the plan."""
# fmt: on
