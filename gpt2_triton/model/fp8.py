"""Operands of matrix products in fp8, and their places in the schedule's view.

With train.precision fp8, Fp8 objects (operands.py) replace the bf16 operands of the layers'
products, forward and backward.  Unless fp8.keep_bf16 is head, they also replace the head's
operands.  Everything else is as in bf16.

A scale belongs to one tensor of one layer.  State.scale has the SCALES of
each layer, then HEAD_SCALES.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2_triton.errors import ConfigError
from gpt2_triton.model.schedule import roll_scales
from gpt2_triton.model.tables import State, Tensors
from gpt2_triton.operands import Fp8

WEIGHTS = ("qkvw", "attprojw", "fcw", "fcprojw")
SCALES = ("ln1", "att", "ln2", "fcg", "dqkv", "datt", "dfch", "dfcg", *WEIGHTS)
HEAD_SCALES = ("lnf", "wte")
HISTORY = 16  # steps, the columns of State.history
# name: field, entries per layer, first entry.  attproj's backward pass reads dx at scale
# datt, fcproj's at scale dfcg
PLACES = dict(ln1=("ln", 2, 0), ln2=("ln", 2, 1), datt=("dx", 2, 1), dfcg=("dx", 2, 2))


def scale_count(n_layer: int, precision: str, keep_bf16: str) -> int:
    """Return the number of scales, from these values of the configuration."""
    if precision == "bf16":
        return 0
    return n_layer * len(SCALES) + (0 if keep_bf16 == "head" else len(HEAD_SCALES))


def scales(dims: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return (tensor, layer) of each scale, in the order of State.scale."""
    layers = [(name, l) for l in range(dims["L"]) for name in SCALES]
    head = [(name, dims["L"]) for name in HEAD_SCALES]
    return [*layers, *head][: dims["Q"]]  # a head in bf16 has none


def place(name: str, layer: int) -> tuple[str, int]:
    """Return the field of Acts or Params, and the entry in it, that the scale of this
    name and layer belongs to.
    """
    field, per_layer, first = PLACES.get(name, (name, 1, 0))
    return field, per_layer * layer + first


def place_operands(
    w: Any, a: Any, q: Any, s: State, dims: Mapping[str, int], record: bool
) -> list[list[Any]]:
    """Put Fp8 views of q into w and a, `record` their amax; return each layer's fp8
    weights, then the head's.
    """
    L = dims["L"]
    index = {scale: i for i, scale in enumerate(scales(dims))}

    def operand(
        name: str, layer: int, rows: Tensor, columns: Tensor, value: Any = None, late: bool = False
    ) -> Any:
        """Return an Fp8; `late`: matmul_dw makes the columns, in memory that operands share."""
        i = index[name, layer]
        amax = s.amax[i] if record else None
        return Fp8(rows, columns, s.scale[i : i + 1], amax, not late, value)

    def weight(name: str, rows: Tensors, columns: Tensors, values: Tensors) -> list[Fp8]:
        forms = zip(rows, columns, values, strict=True)
        return [operand(name, l, *parts) for l, parts in enumerate(forms)]

    a.ln = []
    for l in range(L):
        i = 2 * l
        a.ln.append(operand("ln1", l, q.ln8[i], q.ln8t, late=True))
        a.ln.append(operand("ln2", l, q.ln8[i + 1], q.ln8t, late=True))
        a.dx[i + 1] = operand("datt", l, q.dmid8, q.dout8t, a.dx[i + 1], late=True)
        a.dx[i + 2] = operand("dfcg", l, q.dx8, q.dout8t, a.dx[i + 2], late=True)
    a.fcg = [operand("fcg", l, q.fcg8[l], q.fcg8t[l]) for l in range(L)]
    a.dfch = [operand("dfch", l, q.dfch8, q.dfch8t) for l in range(L)]
    a.dqkv = [operand("dqkv", l, q.dqkv8, q.dqkv8t) for l in range(L)]
    # attention_bwd writes the columns
    a.att = [operand("att", l, q.att8[l], q.att8t, a.att[l]) for l in range(L)]
    w.qkvw = weight("qkvw", q.qkvw8, q.qkvw8t, w.qkvw)
    w.attprojw = weight("attprojw", q.attprojw8, q.attprojw8t, w.attprojw)
    w.fcw = weight("fcw", q.fcw8, q.fcw8t, w.fcw)
    w.fcprojw = weight("fcprojw", q.fcprojw8, q.fcprojw8t, w.fcprojw)
    weights = [[*layer] for layer in zip(w.qkvw, w.attprojw, w.fcw, w.fcprojw, strict=True)]
    if ("wte", L) not in index:
        return [*weights, []]
    # without columns: dW of the head reads lns
    a.lnf = operand("lnf", L, q.lnf8, q.lnf8[:0], a.lnf, late=True)
    w.wte = operand("wte", L, q.wte8, q.wte8t, w.wte)
    # the kernels that write these two also write their scales
    a.p = Fp8(q.p8, q.p8t, q.p_scale, None, True)
    a.lns = Fp8(q.lnf8[:0], q.lns8t, q.lns_scale, None, True)
    return [*weights, [w.wte]]


def clear(row: Tensor | None) -> None:
    """Set a buffer of State with 4-byte elements to 0; do nothing for None."""
    if row is not None:
        row.copy_(torch.from_numpy(np.zeros(row.shape, np.int32)).view(row.dtype))


def calibrate(model: Any, batches: Sequence[Tensor], step_in: np.ndarray) -> None:
    """Set scales by two passes over a step's micro-batches, the first with guessed
    scales; all ranks call it.
    """
    s = model.state
    s.step_in.copy_(torch.from_numpy(step_in))
    # APPLY = 1: roll_scales sets scales
    s.step_out.copy_(torch.from_numpy(np.ones(len(s.step_out), np.float32)))
    clear(s.step_key)
    guess_scales(s, model.dims, float(step_in[model.K.step_io.LOSS_SCALE.value]))
    for _ in range(2):
        clear(s.history)
        clear(s.amax)
        for n, packed in enumerate(batches):
            model.copy_batch(packed, n)
            model.launch_forward_backward(acc=n > 0, with_stats=False, last=False)
        roll_scales(model.K, model.train_view)
    model.lacks_scales = False


def guess_scales(state: State, dims: Mapping[str, int], loss_scale: float) -> None:
    """Set first scales, for activations of about 1, weights of about 1/64,
    gradients times loss_scale.
    """
    gradient = 2.0 ** round(math.log2(4 / loss_scale))
    kinds = dict.fromkeys((*WEIGHTS, "wte"), 64.0)
    guess = [gradient if name[0] == "d" else kinds.get(name, 8.0) for name, _ in scales(dims)]
    state.scale.copy_(torch.from_numpy(np.array(guess, np.float32)))


def saved_spec(spec: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, on "meta": those of `spec`, with the scales that a run of the
    configuration `saved` has; versions without fp8 saved none.
    """
    precision = saved["train"].get("precision", "bf16")
    keep = saved.get("fp8", {}).get("keep_bf16", "head") or "none"
    if precision == "fp8" and keep not in ("head", "none"):
        raise ConfigError(
            f"fp8.keep_bf16: the run had {keep!r}, only head and none "
            "exist; export its weights instead"
        )
    expected = {name: t for name, t in spec.items() if name not in ("scale", "history")}
    count = scale_count(saved["model"]["n_layer"], precision, keep)
    if count:
        expected["scale"] = torch.empty(count, device="meta")
        expected["history"] = torch.empty(count, HISTORY, device="meta")
    return expected
