"""Declares the buffers of fp8 operands that every model has; tables.py has the symbols."""

import dataclasses

from torch import Tensor

from gpt2_triton.model.arena import buf
from gpt2_triton.model.tables import Tensors


# fmt: off
@dataclasses.dataclass
class Fp8Operands:
    """Operands in fp8.  Names that end in t hold columns, the transpose of the rows."""

    ln8:        Tensors = buf("2*L | R C", "e4m3", "block..block_bwd", "activations",
                              drop="gelu+ln")
    att8:       Tensors = buf("L | R Cq",  "e4m3", "block..block_bwd", "activations",
                              drop="none", again="block")
    fcg8:       Tensors = buf("L | R F",   "e4m3", "block..block_bwd", "activations",
                              drop="none", again="block")
    fcg8t:      Tensors = buf("L | F R",   "e4m3", "block..block_bwd", "activations", drop="block")
    dx8:        Tensor  = buf("R C",       "e4m3", "head..block_bwd",  "backward")
    # dx8 for an odd i
    dmid8:      Tensor  = buf("R C",       "e4m3", "block_bwd",        "backward")
    dfch8:      Tensor  = buf("R G",       "e4m3", "block_bwd",        "backward")
    dfch8t:     Tensor  = buf("G R",       "e4m3", "block_bwd",        "backward")
    dqkv8:      Tensor  = buf("R D",       "e4m3", "block_bwd",        "backward", within="dfch8")
    dqkv8t:     Tensor  = buf("D R",       "e4m3", "block_bwd",        "backward", within="dfch8t")
    ln8t:       Tensor  = buf("C R",       "e4m3", "block_bwd",        "backward")
    att8t:      Tensor  = buf("Cq R",      "e4m3", "block_bwd",        "backward")
    dout8t:     Tensor  = buf("C R",       "e4m3", "block_bwd",        "backward")
    lnf8:       Tensor  = buf("R C",       "e4m3", "head",             "head",
                              when="fp8_head")
    p8:         Tensor  = buf("Rc Vp",     "e5m2", "head",             "head",
                              when="fp8_head")
    p8t:        Tensor  = buf("Vp Rc",     "e5m2", "head",             "head",
                              when="fp8_head")
    lns8t:      Tensor  = buf("C Rc",      "e5m2", "head",             "head",
                              when="fp8_head")
    p_scale:    Tensor  = buf("1",         "f32",  "head",             "head",
                              when="fp8_head")
    lns_scale:  Tensor  = buf("1",         "f32",  "head",             "head",
                              when="fp8_head")
    wte8:       Tensor  = buf("Vp C",      "e4m3", "embed..block_bwd", "fp8 weights",
                              when="fp8_head")
    wte8t:      Tensor  = buf("C Vp",      "e4m3", "embed..block_bwd", "fp8 weights",
                              when="fp8_head")
    qkvw8:      Tensors = buf("L | D C",   "e4m3", "embed..block_bwd", "fp8 weights",
                              drop="gelu+ln")
    qkvw8t:     Tensors = buf("L | C D",   "e4m3", "embed..block_bwd", "fp8 weights",
                              drop="gelu+ln")
    attprojw8:  Tensors = buf("L | C Cq",  "e4m3", "embed..block_bwd", "fp8 weights",
                              drop="gelu+ln")
    attprojw8t: Tensors = buf("L | Cq C",  "e4m3", "embed..block_bwd", "fp8 weights",
                              drop="gelu+ln")
    fcw8:       Tensors = buf("L | G C",   "e4m3", "embed..block_bwd", "fp8 weights",
                              drop="gelu+ln")
    fcw8t:      Tensors = buf("L | C G",   "e4m3", "embed..block_bwd", "fp8 weights",
                              drop="gelu+ln")
    fcprojw8:   Tensors = buf("L | C F",   "e4m3", "embed..block_bwd", "fp8 weights",
                              drop="gelu+ln")
    fcprojw8t:  Tensors = buf("L | F C",   "e4m3", "embed..block_bwd", "fp8 weights",
                              drop="gelu+ln")
# fmt: on
