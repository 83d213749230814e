"""Operands of products in fp8: their buffers, and their places in the schedule's view.

An operation of a layer is qkv, attproj or mlp (fc and fcproj, which share GELU's output).  In fp8, objects of
kernels/fp8.py's Fp8 stand in the places of its bf16 operands and of those of its backward pass; everything else is as
in bf16.  The head counts as an operation `head` of the last layer, of which only the product that gives the logits is
in fp8.

A scale belongs to one tensor of one layer.  State.scale has the SCALES of each layer, then HEAD_SCALES.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2_triton.config.values import operations_in_fp8
from gpt2_triton.model.arena import buf
from gpt2_triton.model.buffers import Acts, Params, Recompute, State, Tensors

SCALES = ("ln1", "att", "ln2", "fcg", "dqkv", "datt", "dfch", "dfcg", "qkvw", "attprojw", "fcw", "fcprojw")
HEAD_SCALES = ("lnf", "wte")
HISTORY = 16  # steps in a row of State.history
# datt and dfcg are the scales of dx where the backward pass of attproj and of fcproj reads it
OPERATIONS = dict(qkvw="qkv", attprojw="attproj", fcw="mlp", fcprojw="mlp")
OPERATION_OF = OPERATIONS | dict(ln1="qkv", dqkv="qkv", att="attproj", datt="attproj")
OPERATION_OF |= dict.fromkeys(("ln2", "fcg", "dfch", "dfcg"), "mlp")


# fmt: off
@dataclasses.dataclass
class Fp8Buffers:
    """Rows are [tokens, channels], columns (t) the transpose, which weight gradients read; slope is gelu' in bytes."""

    ln8:        Tensors = buf("2*L | R C", "e4m3", "block..block_bwd", "activations", only="fp8 qkv mlp",
                            drop="gelu+ln")
    att8:       Tensors = buf("L | R C",   "e4m3", "block..block_bwd", "activations", only="fp8 attproj",
                            drop="gelu+ln")
    fcg8:       Tensors = buf("L | R 4*C", "e4m3", "block..block_bwd", "activations", only="fp8 mlp",
                            drop="none", again="block")
    fcg8t:      Tensors = buf("L | 4*C R", "e4m3", "block..block_bwd", "activations", only="fp8 mlp", drop="block")
    slope:      Tensors = buf("L | R 4*C", "u8",   "block..block_bwd", "activations", only="fp8 mlp", drop="block")
    dx8:        Tensor  = buf("R C",       "e4m3", "head..block_bwd",  "backward",    only="fp8 attproj mlp")
    dfch8:      Tensor  = buf("R 4*C",     "e4m3", "block_bwd",        "backward",    only="fp8 mlp")
    dfch8t:     Tensor  = buf("4*C R",     "e4m3", "block_bwd",        "backward",    only="fp8 mlp")
    dqkv8:      Tensor  = buf("R 3*C",     "e4m3", "block_bwd",        "backward",    only="fp8 qkv", within="dfch8")
    dqkv8t:     Tensor  = buf("3*C R",     "e4m3", "block_bwd",        "backward",    only="fp8 qkv", within="dfch8t")
    inp8t:      Tensor  = buf("C R",       "e4m3", "block_bwd",        "backward",    only="fp8 qkv attproj mlp")
    dout8t:     Tensor  = buf("C R",       "e4m3", "block_bwd",        "backward",    only="fp8 attproj mlp")
    lnf8:       Tensor  = buf("R C",       "e4m3", "head",             "head",        only="fp8 head")
    wte8:       Tensor  = buf("Vp C",      "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 head")
    qkvw8:      Tensors = buf("L | 3*C C", "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 qkv", drop="gelu+ln")
    qkvw8t:     Tensors = buf("L | C 3*C", "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 qkv", drop="gelu+ln")
    attprojw8:  Tensors = buf("L | C C",   "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 attproj",
                            drop="gelu+ln")
    attprojw8t: Tensors = buf("L | C C",   "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 attproj",
                            drop="gelu+ln")
    fcw8:       Tensors = buf("L | 4*C C", "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 mlp", drop="gelu+ln")
    fcw8t:      Tensors = buf("L | C 4*C", "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 mlp", drop="gelu+ln")
    fcprojw8:   Tensors = buf("L | C 4*C", "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 mlp", drop="gelu+ln")
    fcprojw8t:  Tensors = buf("L | 4*C C", "e4m3", "embed..block_bwd", "fp8 weights", only="fp8 mlp", drop="gelu+ln")
# fmt: on


def scales(operations: Sequence[Set[str]]) -> list[tuple[str, int]]:
    """Return (tensor, layer) of each scale, in the order of State.scale; empty if nothing is in fp8."""
    if not any(operations):
        return []
    head = HEAD_SCALES if "head" in operations[-1] else ()
    return [(name, l) for l in range(len(operations)) for name in SCALES] + [(name, len(operations)) for name in head]


def in_use(scale: tuple[str, int], operations: Sequence[Set[str]]) -> bool:
    """Return whether an operand has this scale, one of `scales(operations)`: the scales of an operation that is kept in
    bf16 are not used.
    """
    name, layer = scale
    return layer == len(operations) or OPERATION_OF[name] in operations[layer]


def describe(operations: Sequence[Set[str]]) -> str:
    """Return in words what is in fp8: "qkv, attproj, mlp in 12 of 12 layers; the logits in bf16"."""
    by_layers: dict[int, list[str]] = {}
    for name in dict.fromkeys(OPERATIONS.values()):
        by_layers.setdefault(sum(name in layer for layer in operations), []).append(name)
    parts = [f"{', '.join(names)} in {n} of {len(operations)} layers" for n, names in by_layers.items() if n]
    head = "the logits" + ("" if "head" in operations[-1] else " in bf16")
    return "; ".join([*parts, head]) if any(operations) else "nothing, as fp8.keep_bf16 keeps all in bf16"


def place_operands(
    K: Any, w: Params, a: Acts, q: Fp8Buffers, s: State, operations: Sequence[Set[str]], record: bool
) -> list[list[Any]]:
    """Put Fp8 operands into w and a where an operation is in fp8; return each layer's fp8 weights, then the head's.

    record   whether kernels record the tensors' amax, as in training
    """
    weights: list[list[Any]] = []
    R = len(a.x[0])
    for name in ("ln", "fch", "fcg", "dfch", "dqkv"):
        if getattr(a, name) is None:  # no layer has one in bf16
            setattr(a, name, [None] * (2 * len(operations)))

    index = {scale: i for i, scale in enumerate(scales(operations))}

    def operand(rows: Tensor, columns: Tensor | None, layer: int, name: str, **forms: Any) -> Any:
        i = index[name, layer]
        amax = s.amax[i] if record else None
        if columns is None:  # made by matmul_dw
            shared = q.dout8t if name[0] == "d" else q.inp8t
            return K.Fp8(rows, shared.view(-1)[: rows.numel()].view(-1, R), s.scale[i : i + 1], amax, False, **forms)
        return K.Fp8(rows, columns, s.scale[i : i + 1], amax, True, **forms)

    for l, fp8 in enumerate(operations):
        i, own = 2 * l, []
        if "qkv" in fp8:
            a.ln[i] = operand(q.ln8[i], None, l, "ln1")
            a.dqkv[l] = operand(q.dqkv8, q.dqkv8t, l, "dqkv")
        if "attproj" in fp8:
            a.att[l] = operand(q.att8[l], None, l, "att", value=a.att[l])
            a.dx[i + 1] = operand(q.dx8, None, l, "datt", value=a.dx[i + 1])
        if "mlp" in fp8:
            a.ln[i + 1] = operand(q.ln8[i + 1], None, l, "ln2")
            a.fcg[l] = operand(q.fcg8[l], q.fcg8t[l], l, "fcg")
            a.fch[l] = q.slope[l]
            a.dfch[l] = operand(q.dfch8, q.dfch8t, l, "dfch")
            a.dx[i + 2] = operand(q.dx8, None, l, "dfcg", value=a.dx[i + 2])
        for name, operation in OPERATIONS.items():
            if operation in fp8:
                tensors, rows, columns = getattr(w, name), getattr(q, f"{name}8")[l], getattr(q, f"{name}8t")[l]
                tensors[l] = operand(rows, columns, l, name, value=tensors[l])
                own.append(tensors[l])
        weights.append(own)
    weights.append([])
    if "head" in operations[-1]:
        for table, name, rows in ((a, "lnf", q.lnf8), (w, "wte", q.wte8)):
            i = index[name, len(operations)]
            amax, value = s.amax[i] if record else None, getattr(table, name)
            setattr(table, name, K.Fp8(rows, rows[:0], s.scale[i : i + 1], amax, False, value))
        weights[-1].append(w.wte)
    return weights


def cast_again(att: Any, weights: list[Any], redo: Recompute) -> list[Any]:
    """Return the operands of a layer that its backward pass casts again, as their fp8 rows are not kept: the weights,
    and attention's output, unless that is in bf16 only or the whole layer is computed again.
    """
    if not redo.ln:
        return []
    return weights if redo.block or isinstance(att, Tensor) else [*weights, att]


def clear(row: Tensor | None) -> None:
    """Set a row of State, of 4 bytes an element, to 0 if there is one."""
    if row is not None:
        row.copy_(torch.from_numpy(np.zeros(row.shape, np.int32)).view(row.dtype))


def guess_scales(state: State, operations: Sequence[Set[str]], loss_scale: float) -> None:
    """Set the scales of the first calibration pass: for activations of about 1, weights of about 1/64, and gradients of
    a loss that is multiplied by loss_scale.
    """
    gradient = 2.0 ** round(math.log2(4 / loss_scale))
    kinds = dict.fromkeys((*OPERATIONS, "wte"), 64.0)
    guess = [gradient if name[0] == "d" else kinds.get(name, 8.0) for name, _ in scales(operations)]
    state.scale.copy_(torch.from_numpy(np.array(guess, np.float32)))


def without_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors but those of the scales."""
    return {name: tensor for name, tensor in tensors.items() if name not in ("scale", "history")}


def operations_of(saved: Mapping[str, Any]) -> list[frozenset[str]]:
    """Return what was in fp8 by the configuration in a checkpoint, perhaps one of a version without fp8."""
    precision, keep = saved["train"].get("precision", "bf16"), saved.get("fp8", {}).get("keep_bf16", "head")
    return operations_in_fp8(precision, keep, saved["model"]["n_layer"])


def saved_spec(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return shapes and dtypes of the scales in a checkpoint with this configuration, on the device "meta"."""
    if not (count := len(scales(operations_of(saved)))):
        return {}
    return {"scale": torch.empty(count, device="meta"), "history": torch.empty(count, HISTORY, device="meta")}


def carry_scales(
    tensors: Mapping[str, Tensor], before: Sequence[Set[str]], now: Sequence[Set[str]]
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with `scale` and `history` in the order of `now`, of a run in which `before` was in
    fp8; without them if a tensor that is in fp8 now was not then, or if nothing is.
    """
    if list(before) == list(now):
        return dict(tensors)
    carried = without_scales(tensors)
    rows = {scale: i for i, scale in enumerate(scales(before)) if in_use(scale, before)}
    wanted = scales(now)
    if not wanted or any(in_use(scale, now) and scale not in rows for scale in wanted):
        return carried
    for name, unused in (("scale", 1.0), ("history", 0.0)):
        old = tensors[name].numpy()
        new = [old[rows[scale]] if scale in rows else np.full_like(old[0], unused) for scale in wanted]
        carried[name] = torch.from_numpy(np.stack(new))
    return carried
