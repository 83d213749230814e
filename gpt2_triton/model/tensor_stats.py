"""Statistics of the tensors of a step: rms, largest absolute value and
non-finite elements, layer by layer.

The schedule tells m.observe what it has written.  In a step with statistics, m.observe is a
StatsRecorder: its kernels read each tensor before other kernels overwrite the tensor's bytes.  No
byte of the training changes.

x[i], qkv[l], att[l], fch[l]   activations of the forward pass, named as in tables.py; in
                               an fp8 run fcg[l], not fch[l]
dx[i]                          the gradient of the loss at x[i], times the loss scale
each fp8 tensor                the share of its elements that saturate at
                               448, and the share that is 0
each parameter                 its gradient before the update, the weights,
                               and the update before rounding

Each rank reads what it computes: the activations of its own sequences, and the parameters that it
updates (at ZeRO-0 all, else its shard).  The host combines the ranks' partial results.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.model.architecture import Architecture
from gpt2_triton.model.arena import eval_shape
from gpt2_triton.model.fp8 import HEAD_SCALES, clear, place, scales
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model_view import ModelView, Observer
from gpt2_triton.model.tables import param_entries
from gpt2_triton.operands import Matrices, Span

ACTIVATION = ("rms", "absmax", "nonfinite")
FP8 = ("saturated", "zero")
PARAMETER = ("grad_rms", "grad_absmax", "nonfinite", "weight_rms", "update_ratio")

# tensor -> column -> a number for each point or layer
Table = dict[str, dict[str, list[Any]]]
Statistics = dict[str, Table]  # by kind


def tracked_activations(dims: dict[str, int]) -> list[tuple[str, int]]:
    """Return (name, index) of every activation in act_stats, in its order;
    dx[i] is the gradient at x[i].
    """
    hidden = "fcg" if dims["Q"] else "fch"  # fp8 runs store GELU's output, not its input
    counts = {
        "x": dims["S"],
        "qkv": dims["L"],
        "att": dims["L"],
        hidden: dims["L"],
        "dx": dims["S"],
    }
    return [(name, i) for name, n in counts.items() for i in range(n)]


class StatsRecorder(Observer):
    """Launches the kernels that take statistics, in the micro-steps that `begin` announces."""

    def __init__(self, K: Kernels, A: Architecture, view: ModelView, dims: dict[str, int]):
        """view: the ModelView of training."""
        self._K = K
        self._view = view
        self._scales = scales(dims)
        self._named = vars(view.a) | vars(view.w)
        self._weights = {field.name for field in dataclasses.fields(A.Params)}
        s = view.s
        self.buffers = (s.act_stats, s.par_stats, *([s.fp8_stats] if self._scales else []))
        for buffer in self.buffers:
            K.fill(buffer, 0.0)
        self._tracked = tracked_activations(dims)
        places = [place(*scale) for scale in self._scales]
        self._act_rows = dict(zip(self._tracked, s.act_stats, strict=True))
        self._fp8_rows = dict(zip(places, s.fp8_stats, strict=True)) if places else {}
        self._fp8_elements = [self._tensor(*entry).rows.numel() for entry in places]
        shapes = {field.name: field.metadata["spec"].shape for field in dataclasses.fields(A.Acts)}
        self._elements = [math.prod(eval_shape(shapes[name], dims)) for name, _ in self._tracked]
        # each rank updates its shard of the parameters, not all of them
        self._sharded = dims["zero"] > 0
        self._entries = list(param_entries(A.Params, dims))
        self._spans = [(e.offset, e.offset + e.used) for e in self._entries]

    def begin(self, acc: bool) -> "StatsRecorder":
        """Begin a micro-step, and return self; if `acc`, its statistics are
        combined with the previous ones.
        """
        self._acc = acc
        self._seen = set[tuple[str, int]]()
        return self

    def _tensor(self, name: str, i: int) -> Any:
        found = self._named[name]
        return found[i] if isinstance(found, list) else found

    def tensors(self, **entries: int) -> None:
        for entry in entries.items():
            if entry in self._seen:  # computed again in the backward pass
                continue
            self._seen.add(entry)
            x = self._tensor(*entry)
            if entry in self._act_rows:
                self._K.tensor_stats(self._act_rows[entry], x, self._acc)
            # cast in each micro-step, counted in the first
            counted = self._acc and entry[0] in self._weights
            if entry in self._fp8_rows and not counted:
                self._K.fp8_stats(self._fp8_rows[entry], x, self._acc)

    def adamw(self, span: Span) -> None:
        for out, r in self._parts(span.first, len(span.w)):
            self._K.parameter_stats(out, span.part(r), self._view.step, self._view.betas)

    def muon(self, c: Matrices) -> None:
        for l in range(len(c.w)):
            for out, r in self._parts(c.first + l * c.distance, c.w.shape[1]):
                self._K.muon_stats(out, c.part(l, r), self._view.step)

    def _parts(self, first: int, n: int) -> Iterator[tuple[Tensor, slice]]:
        """Yield each parameter's row of par_stats and its slice of n elements from `first` on."""
        for out, (start, stop) in zip(self._view.s.par_stats, self._spans, strict=True):
            r = slice(max(start, first) - first, min(stop, first + n) - first)
            if r.start < r.stop:
                yield out, r

    def read(
        self, partials: Sequence[Tensor], micro_steps: int, control: ControlGroup
    ) -> Statistics:
        """Return a step's record.  All ranks call it.

        partials    host copies of `buffers`: fp32 [tensors, 3, P] of activations, and, unless only
                    these are asked for, [tensors, 5, P] of parameters, [tensors, 2, P] of fp8
        """
        record: Statistics = {"activations": {}, "parameters": {}}
        own = [_combine_parts(part) for part in partials[:2]]
        own += [part.numpy().sum(-1, dtype=np.float64) for part in partials[2:]]
        found = control.all_gather([sums.tolist() for sums in own])
        ranks = len(found)
        acts, *more = (np.array(sums) for sums in zip(*found, strict=True))
        names = [name for name, _ in self._tracked]
        columns = _combine_ranks(acts, np.array(self._elements) * micro_steps * ranks)
        _append(record["activations"], names, ACTIVATION, columns)
        if more:
            names = [e.name for e in self._entries]
            elements = np.array([stop - start for start, stop in self._spans])
            columns = _combine_ranks(more[0] if self._sharded else more[0][:1], elements)
            _append(record["parameters"], names, PARAMETER, columns)
        if len(more) > 1:
            names = [name for name, _ in self._scales]
            passes = [1 if name in self._weights else micro_steps for name in names]
            shares = more[1].sum(0).T / (np.array(self._fp8_elements) * passes * ranks)
            _append(record.setdefault("fp8", {}), names, FP8, shares)
        return record

    def first_non_finite(self, micro_steps: int, control: ControlGroup) -> str:
        """Return in words the first tensor with non-finite elements in the latest gradients.  If
        there is none, return the fp8 tensor of the lowest layer with a non-finite amax, or "".
        Clears amax.  All ranks call it.
        """
        acts = self._view.s.act_stats.cpu()
        found = first_non_finite(self.read([acts], micro_steps, control))
        if not self._scales:
            return found
        bits = control.all_gather(self._view.s.amax.cpu().numpy().max(1).tolist())
        amax = np.max(np.array(bits, np.int32), axis=0).view(np.float32)
        clear(self._view.s.amax)
        if found:
            return found
        for scale, most in zip(self._scales, amax, strict=True):
            if not np.isfinite(most):
                return f"{fp8_name(*scale)} (before it is rounded to e4m3)"
        return ""


def _combine_parts(partials: Tensor) -> np.ndarray:
    """Return a rank's [tensors, 3 or 5, P] without P: column 1 by maximum, others by sums."""
    parts = partials.numpy().astype(np.float64)
    out = parts.sum(-1)
    out[:, 1] = parts[:, 1].max(-1)
    return out


def _combine_ranks(ranks: np.ndarray, elements: np.ndarray) -> list[np.ndarray]:
    """Return the columns of the record from [ranks, tensors, 3 or 5], each rank's sums."""
    squares, _, bad, *more = ranks.sum(0).T
    largest = ranks[:, :, 1].max(0)
    columns = [np.sqrt(squares / np.maximum(elements - bad, 1)), largest, bad]
    if more:
        weights, updates = more
        ratio = np.sqrt(np.divide(updates, weights, out=np.zeros_like(updates), where=weights != 0))
        columns += [np.sqrt(weights / elements), ratio]
    return columns


def _append(
    kind: Table, names: list[str], columns: Sequence[str], values: Iterable[np.ndarray]
) -> None:
    for column, numbers in zip(columns, values, strict=True):
        for name, number in zip(names, numbers.tolist(), strict=True):
            kind.setdefault(name, {}).setdefault(column, []).append(_shown(column, number))


def _shown(column: str, number: float) -> int | float | None:
    """Return a number of a record; None for one that JSON does not know."""
    if column == "nonfinite":
        return int(number)
    return float(f"{number:.5g}") if math.isfinite(number) else None


# ---- records as text ----


def first_non_finite(record: Statistics) -> str:
    """Return the first tensor, in the order of a step, that has non-finite elements,
    with their number, or "".
    """
    acts = record["activations"]
    for name, i in _in_order(len(acts["qkv"]["rms"]), "fcg" if "fcg" in acts else "fch"):
        if count := acts[name]["nonfinite"][i]:
            return f"{activation_name(name, i)} ({count:,} elements)"
    for name, columns in record["parameters"].items():
        for i, count in enumerate(columns["nonfinite"]):
            if count:
                return f"gradient of {parameter_name(name, i, columns)} ({count:,} elements)"
    return ""


def _in_order(layers: int, hidden: str) -> Iterator[tuple[str, int]]:
    yield "x", 0
    for l in range(layers):
        yield from (("qkv", l), ("att", l), ("x", 2 * l + 1), (hidden, l), ("x", 2 * l + 2))
    for point in reversed(range(2 * layers + 1)):
        yield "dx", point


def activation_name(name: str, i: int) -> str:
    """Return an activation's place in the model in words: "x after layer 3's attention"."""
    if name not in ("x", "dx"):
        return f"{name} of layer {i}"
    where = f"layer {(i - 1) // 2}"
    if i == 0:
        where = "the embedding"
    elif i % 2:
        where += "'s attention"
    return f"x after {where}" if name == "x" else f"gradient at x after {where}"


def parameter_name(name: str, i: int, columns: dict[str, list[Any]]) -> str:
    """Return "qkvw[3]", or "wte" if there is one such tensor only."""
    return f"{name}[{i}]" if len(columns["nonfinite"]) > 1 else name


def fp8_name(name: str, i: int) -> str:
    """Return an fp8 tensor's place in words: "fcg of layer 3", or "lnf of the head"."""
    return f"{name} of {'the head' if name in HEAD_SCALES else f'layer {i}'}"


def _largest(tensors: Table, column: str) -> tuple[float, str, int]:
    """Return a column's largest number, its tensor and entry; what is not finite is largest."""
    return max(
        (math.inf if number is None else number, name, i)
        for name, columns in tensors.items()
        for i, number in enumerate(columns[column])
    )


def format_summary(record: Statistics) -> str:
    """Return the largest activation, gradient and update in a line; biases start at 0,
    so only matrices' updates.
    """
    params = record["parameters"]
    acts = {name: columns for name, columns in record["activations"].items() if name != "dx"}
    matrices = {
        name: columns
        for name, columns in params.items()
        if name != "lnw" and not name.endswith("b")
    }
    most, name, i = _largest(acts, "absmax")
    parts = [f"largest activation {most:.3g} in {activation_name(name, i)}"]
    for what, tensors, column in (
        ("gradient rms", params, "grad_rms"),
        ("update/weight", matrices, "update_ratio"),
    ):
        most, name, i = _largest(tensors, column)
        parts.append(f"largest {what} {most:.3g} in {parameter_name(name, i, tensors[name])}")
    if "fp8" in record:
        share, name, i = _largest(record["fp8"], "saturated")
        saturated = f"most saturated fp8 tensor {fp8_name(name, i)}, {share:.2%}"
        parts.append(saturated if share else "no fp8 tensor saturated")
    bad = first_non_finite(record)
    if bad:
        parts.append(f"not finite: {bad}")
    return " | ".join(parts)


def format_table(record: Statistics) -> str:
    """Return all of a record as text, one line per tensor."""
    lines = []
    for kind, columns in dict(activations=ACTIVATION, parameters=PARAMETER, fp8=FP8).items():
        if kind not in record:
            continue
        lines += [f"{kind:<14}" + "".join(f"{column:>14}" for column in columns)]
        for name, values in record[kind].items():
            rows = [*zip(*(values[column] for column in columns), strict=True)]
            for i, row in enumerate(rows):
                shown = f"{name}[{i}]" if len(rows) > 1 else name
                lines.append(f"{shown:<14}" + "".join(map(_cell, row)))
        lines.append("")
    bad = first_non_finite(record)
    return "\n".join([*lines, f"first non-finite: {bad or 'none'}"])


def _cell(number: int | float | None) -> str:
    shown = "-"
    if isinstance(number, float):
        shown = f"{number:.4g}"
    elif number is not None:
        shown = f"{number:,}"
    return f"{shown:>14}"
