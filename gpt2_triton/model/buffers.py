"""Every buffer of GPT-2 training, once.

B batch, T sequence, C channels, NH heads, HS head size, L layers, V vocabulary, Vp padded vocabulary, Tmax longest
sequence, R = B*T rows, Rc rows of one head chunk, S = 2L + 1 points of the residual stream: x[2l] enters layer l,
x[2l+1] leaves its attention, x[2L] is the last.  ln[i] is the norm of point x[i]; its weights are lnw[i], lnb[i], so
the final norm is an ordinary row. N is the number of parameters; Nf, Nt, Nm, Ng, Nr, Nx are elements of flat buffers,
N or 0 on one rank (layout.py); Np the elements of a packed batch, W of the scratch; Nw is WINDOW + 1 in training; Tmax
is model.block_size; Sa activations and Sp parameters have statistics, in P partial results each.  Bd sequences are
decoded at once, 0 without decoding.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpt2_triton.config.schema import RECOMPUTE_LEVELS
from gpt2_triton.model.arena import buf, sizes

WINDOW = 128  # steps that a loss and a gradient norm are compared with, as in llm.c


@dataclasses.dataclass(frozen=True)
class Recompute:
    """What the backward pass computes again instead of reading back, by memory.recompute."""

    gelu: bool
    ln: bool
    qkv: bool
    block: bool

    @classmethod
    def at(cls, level: str) -> "Recompute":
        depth = RECOMPUTE_LEVELS.index(level)
        return cls(gelu=1 <= depth <= 3, ln=depth >= 2, qkv=depth == 3, block=depth == 4)


def layer_levels(recompute: str, L: int) -> list[str]:
    """The level of each layer: LEVEL for all; LEVEL:N for the first N, and for the others the level before it."""
    level, _, first = recompute.partition(":")
    n = int(first or L)
    return [level] * n + [RECOMPUTE_LEVELS[RECOMPUTE_LEVELS.index(level) - 1]] * (L - n)


Tensors = list[Tensor]


def par(shape: str, group: str, init: str, decay: bool = False) -> Any:
    """A parameter.  group: "embed", "layer" (one per layer) or "rest"; init: "normal", "residual" (normal /
    sqrt(2L)), "zero", "one".
    """
    return dataclasses.field(metadata=dict(shape=shape, group=group, init=init, decay=decay))


# fmt: off
@dataclasses.dataclass
class Params:
    """Weights are [out, in].  The flat order is: embed | layer 0 | layer 1 | ... | rest; weight decay stops where
    `rest` begins.
    """

    #                        shape      group    init        decay
    wte:      Tensor  = par("Vp C",   "embed", "normal",   True)  # also the output head; rows V..Vp stay zero
    wpe:      Tensor  = par("Tmax C", "embed", "normal",   True)
    qkvw:     Tensors = par("3*C C",  "layer", "normal",   True)
    attprojw: Tensors = par("C C",    "layer", "residual", True)
    fcw:      Tensors = par("4*C C",  "layer", "normal",   True)
    fcprojw:  Tensors = par("C 4*C",  "layer", "residual", True)
    lnw:      Tensor  = par("S C",    "rest",  "one")
    lnb:      Tensor  = par("S C",    "rest",  "zero")
    qkvb:     Tensor  = par("L 3*C",  "rest",  "zero")
    attprojb: Tensor  = par("L C",    "rest",  "zero")
    fcb:      Tensor  = par("L 4*C",  "rest",  "zero")
    fcprojb:  Tensor  = par("L C",    "rest",  "zero")


@dataclasses.dataclass
class State:
    """What lives from step to step, flat in the order of Params."""

    params: Tensor = buf("Nf", "act", "embed..between",   "parameters")
    low:    Tensor = buf("Nm", "i16", "embed..between",   "optimizer")  # the 16 lower bits of fp32 masters
    m:      Tensor = buf("Nt", "f32", "embed..between",   "optimizer")
    v:      Tensor = buf("Nt", "f32", "embed..between",   "optimizer")
    grads:  Tensor = buf("Ng", "f32", "embed..update",    "gradients")  # of this rank's batches; summed in place
    reduced:  Tensor = buf("Nr", "f32", "embed..update",  "gradients")  # ZeRO-2: this rank's share of the sums
    received: Tensor = buf("Nx", "f32", "block_bwd",      "gradients")  # other ranks', to be added up
    window: Tensor = buf("2 Nw", "f32", "embed..between", "optimizer")  # recent losses, norms: kernels/outlier.py
    # loss, gradient norm, clip factor, apply, squared norm, ranks that were asked to stop
    step_out: Tensor = buf("6",  "f32", "embed..between",   "inputs")
    z:      Tensor = buf("2",  "f32", "update..between",  "inputs")  # z-scores of loss and gradient norm
    act_stats: Tensor = buf("Sa 3 P", "f32", "embed..between", "statistics")  # of watched steps: watch.py
    par_stats: Tensor = buf("Sp 5 P", "f32", "embed..between", "statistics")
    step_in: Tensor = buf("8",  "f32", "embed..update",    "inputs")  # optim.step_inputs
    step_key: Tensor = buf("4",  "i32", "embed..update",    "inputs")  # step, seed low, seed high
    packed: Tensor = buf("Np", "i32", "embed..block_bwd", "inputs")  # the batch, as data/loader.py packs it


@dataclasses.dataclass
class Acts:
    # `drop` names the recompute level from which on layers have one buffer, computed again in the backward pass
    x:       Tensors = buf("S | R C",    "act", "embed..block_bwd", "activations", drop="block:odd")  # residual stream
    ln:      Tensors = buf("2*L | R C",  "act", "block..block_bwd", "activations", drop="gelu+ln")
    mean:    Tensors = buf("S | R",      "f32", "block..block_bwd", "activations")
    rstd:    Tensors = buf("S | R",      "f32", "block..block_bwd", "activations")
    qkv:     Tensors = buf("L | R 3*C",  "act", "block..block_bwd", "activations", drop="gelu+ln+qkv")
    lse:     Tensors = buf("L | B NH T", "f32", "block..block_bwd", "activations", drop="block")  # log2 of row sums
    att:     Tensors = buf("L | R C",    "act", "block..block_bwd", "activations", drop="block")
    fch:     Tensors = buf("L | R 4*C",  "act", "block..block_bwd", "activations", drop="block")  # before GELU
    fcg:     Tensors = buf("L | R 4*C",  "act", "block..block_bwd", "activations", drop="gelu", again="block")  # after
    lnf:     Tensor  = buf("R C",        "act", "head..block_bwd",  "head")  # the final norm, norm of x[2L]
    zt:      Tensor  = buf("R",          "f32", "head",             "head")  # log2(e) * logit of the target
    p:       Tensor  = buf("Rc Vp",      "act", "head",             "head")  # exp(logit - target logit)
    rs:      Tensor  = buf("R",          "f32", "head",             "head")  # factor of p in dlogits
    ks:      Tensor  = buf("R",          "f32", "head..block_bwd",  "head")  # dlogits of the target
    lns:     Tensor  = buf("Rc C",       "act", "head",             "head")  # rs * lnf
    losses:  Tensor  = buf("R",          "f32", "embed..update",    "head")  # of each token, summed over micro-steps
    dx:      Tensor  = buf("R C",        "act", "head..block_bwd",  "backward")  # gradient of the residual stream
    dln:     Tensor  = buf("R C",        "act", "head..block_bwd",  "backward")
    datt:    Tensor  = buf("R C",        "act", "block_bwd",        "backward",    within="dln")
    dfch:    Tensor  = buf("R 4*C",      "act", "block_bwd",        "backward")
    dqkv:    Tensor  = buf("R 3*C",      "act", "block_bwd",        "backward",    within="dfch")
    delta:   Tensor  = buf("B NH T",     "f32", "block_bwd",        "backward")  # rowsum(dout * out) of attention
    scratch: Tensor  = buf("W",          "f32", "head..update",     "scratch")  # partial sums of one launch


@dataclasses.dataclass
class Decoding:
    """What decoding keeps beside the forward pass's buffers, which it uses for Bd rows.  The backward pass may have
    the bytes: nothing outlives the text that is being written.
    """

    cache:  Tensors = buf("L | Bd T 2 C", "act", "embed block head between", "decoding")  # keys, values
    logits: Tensor  = buf("Bd Vp",        "f32", "embed block head between", "decoding")
    seq:    Tensor  = buf("Bd 5",         "i32", "embed block head between", "decoding")  # see kernels/decode.py
# fmt: on


class Entry(NamedTuple):
    """One parameter tensor in the flat order."""

    name: str
    layer: int | None
    bucket: int  # 0 embed, 1 + l layer l, L + 1 rest
    inside: int  # where it begins in its bucket
    offset: int  # its flat index: where it begins among all parameters, the same on any number of ranks
    shape: tuple[int, ...]
    init: str
    decay: bool


def param_entries(dims: dict[str, int]) -> Iterator[Entry]:
    """Every parameter tensor in the flat order: embed | layer 0 | layer 1 | ... | rest."""
    fields = dataclasses.fields(Params)
    groups = [("embed", None), *(("layer", layer) for layer in range(dims["L"])), ("rest", None)]
    offset = 0
    for bucket, (group, layer) in enumerate(groups):
        first = offset
        for field in (f for f in fields if f.metadata["group"] == group):
            m, shape = field.metadata, sizes(field.metadata["shape"], dims)
            yield Entry(field.name, layer, bucket, offset - first, offset, shape, m["init"], m["decay"])
            offset += math.prod(shape)


def named(flat: Tensor, dims: dict[str, int], starts: Sequence[int] | None = None) -> Params:
    """Params whose tensors are views of a flat buffer (parameters or gradients alike); `starts` says where in it each
    bucket begins, if they do not simply follow one another.
    """
    views: dict[str, Any] = {}
    for e in param_entries(dims):
        at = e.offset if starts is None else starts[e.bucket] + e.inside
        view = flat[at : at + math.prod(e.shape)].view(e.shape)
        if e.layer is None:
            views[e.name] = view
        else:
            views.setdefault(e.name, []).append(view)
    return Params(**views)
