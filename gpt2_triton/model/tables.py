"""Declares the buffers that every model has; a model adds its Params and Acts, as gpt2/buffers.py
does.  A buffer is a row whose columns BufferSpec explains (arena.py).

Symbols of shapes:

B, T       sequences of a micro-batch, tokens of a sequence; R = B*T rows; the
           head takes Rc rows at a time
C, NH, HS  channels, heads, head size
D, Cq, Ckv columns of qkv, of q in it, and of k or v: D = Cq + 2*Ckv.  Cq = NH*HS is C unless
           model.head_dim says otherwise, and Ckv is Cq unless heads of q share heads of k and v
Qn, Hn     heads of q and k that are normed, and the columns of their norms' weights: HS; both are 0
           without model.qk_norm
F, G       width of the MLP; rows of fcw, 2F with a gate, else F
Tr         positions that q and k are rotated to, at most block_size
L, S       layers; S = 2L + 1 points of the residual stream: x[2l] enters layer l, x[2l+1] leaves
           its attention, x[2L] is the last.  The norm of x[i] has weights lnw[i], lnb[i] and output
           ln[i]; its output for x[2L] is lnf
V, Vp      vocabulary, padded vocabulary
Tmax       the longest sequence, model.block_size
N, Ne, Nl  parameters: all, of the bucket `embed`, of a layer.  Flat buffers (sharding.py) hold
           Nf parameters, Nt first and Nv second moments, Nm low halves of fp32 masters, and
           Ng, Nr and Nx gradients.  On one rank each is N, or 0 if not needed.  Muon's Nv
           leaves out the layers' matrices
No, Nc     elements of the layers' matrices, and of what a rank orthogonalises at
           once (muon.py); 0 without Muon
Np, W, Nw  elements of the packed batch (data/packing.py), the scratch, and a row of
           `window`: WINDOW + 1 in training
Q          tensors with an fp8 scale, 0 in bf16 (fp8.py)
Sa, Sp, As activations, parameters and fp8 tensors that have statistics; each has P partial results
Bd, Bl     sequences that are decoded at once, 0 without decoding; rows of logits

Conditions of rows, 1 or 0:

trains     not in a model that only runs forward
bf16       the layers' operands are in bf16 (or fp32)
bf16_head  the head's operands are; fp8_head: they are in fp8
dropout    a gradient that dropout masks has a place of its own: never in fp8
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpt2_triton.model.arena import buf, eval_shape
from gpt2_triton.operands import Operand

WINDOW = 128  # steps that a loss and a gradient norm are compared with, as in llm.c


Tensors = list[Tensor]
Extent = tuple[int, int]  # of a checkpoint's tensor: flat index, elements
# of a checkpoint's tensor: its name, index of the part's first element, elements
Part = tuple[str, int, Tensor]


def param(shape: str, group: str, init: str, matrices: str = "") -> Any:
    """Return a dataclass field that declares a parameter.

    group    "embed", "layer" (one tensor per layer) or "rest"
    init     "normal", "residual" (normal / sqrt(2L)), "zero", "one"
    matrices shapes of the matrices, one below the other, that Muon takes
    apart; "": the parameter is one
    """
    return dataclasses.field(
        default=None, metadata=dict(shape=shape, group=group, init=init, matrices=matrices)
    )


# fmt: off
@dataclasses.dataclass
class State:
    """Buffers that keep their contents from step to step, and the inputs and results of a step."""

    params:     Tensor = buf("Nf",     "act", "embed..between",   "parameters")
    # the 16 lower bits of fp32 masters
    master_low: Tensor = buf("Nm",     "i16", "embed..between",   "optimizer")
    m:          Tensor = buf("Nt",     "m",   "embed..between",   "optimizer")
    v:          Tensor = buf("Nv",     "v",   "embed..between",   "optimizer")
    # Muon's x of each class: muon.py
    orth:       Tensor = buf("No",     "act", "update",           "optimizer")
    # the next x, of one class
    orth_next:  Tensor = buf("Nc",     "act", "update",           "optimizer")
    gram:       Tensor = buf("Nc",     "act", "update",           "optimizer")
    poly:       Tensor = buf("Nc",     "act", "update",           "optimizer")
    # of this rank's batches, then sums
    grads:      Tensor = buf("Ng",     "f32", "embed..update",    "gradients")
    # ZeRO-2: this rank's shard of the sums
    reduced:    Tensor = buf("Nr",     "f32", "embed..update",    "gradients")
    # of other ranks, to be summed
    received:   Tensor = buf("Nx",     "f32", "block_bwd",        "gradients")
    # recent losses, norms: outlier.py
    window:     Tensor = buf("2 Nw",   "f32", "embed..between",   "optimizer")
    # of fp8 tensors: kernels/fp8.py
    scale:      Tensor = buf("Q",      "f32", "embed..between",   "optimizer")
    # their amax in the last steps
    history:    Tensor = buf("Q 16",   "f32", "embed..between",   "optimizer")
    # this step's amax, in 32 cells each
    amax:       Tensor = buf("Q 32",   "i32", "embed..between",   "optimizer")
    # see kernels/step_io.py
    step_out:   Tensor = buf("6",      "f32", "embed..between",   "inputs")
    # z-scores of loss and gradient norm
    z:          Tensor = buf("2",      "f32", "update..between",  "inputs")
    # see tensor_stats.py
    act_stats:  Tensor = buf("Sa 3 P", "f32", "embed..between",   "statistics")
    par_stats:  Tensor = buf("Sp 5 P", "f32", "embed..between",   "statistics")
    fp8_stats:  Tensor = buf("As 2 P", "f32", "embed..between",   "statistics")
    # lr_schedule.step_inputs
    step_in:    Tensor = buf("8",      "f32", "embed..update",    "inputs")
    # see kernels/step_io.py
    step_key:   Tensor = buf("4",      "i32", "embed..update",    "inputs")
    # packed by data/packing.py
    batch:      Tensor = buf("Np",     "i32", "embed..block_bwd", "inputs")


class InLayers:
    """What launches that models share read of a model's LayerActs."""

    x: Tensors
    ln: Tensors
    qkv: Tensors
    att: Tensors
    fcg: Tensors


@dataclasses.dataclass
class HeadActs(InLayers):
    """Activations and gradients outside the layers, and what the layers share with the head."""

    # the final norm, of x[2L]
    lnf:     Operand = buf("R C",        "act", "head..block_bwd",  "head")
    # log2(e) * logit of the target
    zt:      Tensor  = buf("R",          "f32", "head",             "head")
    # exp(logit - target's)
    p:       Operand = buf("Rc Vp",      "act", "head",             "head", when="bf16_head trains")
    # factor of p in dlogits
    rs:      Tensor  = buf("R",          "f32", "head",             "head")
    ks:      Tensor  = buf("R",          "f32", "head..block_bwd",  "head")  # dlogits of the target
    # rs * lnf
    lns:     Operand = buf("Rc C",       "act", "head",             "head", when="bf16_head trains")
    # of each token, summed over micro-steps
    losses:  Tensor  = buf("R",          "f32", "embed..update",    "head")
    # gradient at x[i]; in fp8 all but the first are operands
    dx:      Tensors = buf("S | R C",    "act", "head..block_bwd",  "backward",    one_copy=True)
    # dx, masked by dropout
    dbranch: Tensor  = buf("R C",        "act", "head..block_bwd",  "backward", when="dropout")
    dln:     Tensor  = buf("R C",        "act", "head..block_bwd",  "backward")
    # rowsum(dout * out) of attention
    delta:   Tensor  = buf("B NH T",     "f32", "block_bwd",        "backward")
    # partial sums of one launch
    scratch: Tensor  = buf("W",          "f32", "head..update",     "scratch")
# fmt: on


class ParamEntry(NamedTuple):
    """One parameter tensor in the flat order."""

    name: str
    layer: int | None
    bucket: int  # 0 embed, 1 + l layer l, L + 1 rest
    bucket_offset: int  # its first element's index in the bucket
    # its flat index: the first element's index among all parameters, on any number of ranks
    offset: int
    shape: tuple[int, ...]
    used: int  # elements before its padding, the rows from V on
    init: str


def param_entries(table: type, dims: dict[str, int]) -> Iterator[ParamEntry]:
    """Yield every tensor of a table of parameters that has elements, in the flat order: embed |
    layer 0 | layer 1 | ... | rest.
    """
    fields = dataclasses.fields(table)
    groups = [("embed", None), *(("layer", layer) for layer in range(dims["L"])), ("rest", None)]
    offset = 0
    for bucket, (group, layer) in enumerate(groups):
        first = offset
        for field in (f for f in fields if f.metadata["group"] == group):
            m = field.metadata
            shape = eval_shape(m["shape"], dims)
            if not math.prod(shape):
                continue
            used = math.prod(eval_shape(m["shape"].replace("Vp", "V"), dims))
            yield ParamEntry(
                field.name,
                layer,
                bucket,
                offset - first,
                offset,
                shape,
                used,
                m["init"],
            )
            offset += math.prod(shape)


def param_views(
    table: type, flat: Tensor, dims: dict[str, int], starts: Sequence[int] | None = None
) -> Any:
    """Return `table` with views of a flat buffer, None for a tensor without elements; `starts`:
    where buckets begin, if not one after the other.
    """
    views: dict[str, Any] = {}
    for e in param_entries(table, dims):
        at = e.offset if starts is None else starts[e.bucket] + e.bucket_offset
        view = flat[at : at + math.prod(e.shape)].view(e.shape)
        if e.layer is None:
            views[e.name] = view
        else:
            views.setdefault(e.name, []).append(view)
    return table(**views)
