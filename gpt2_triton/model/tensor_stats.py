"""What the tensors of a step look like: rms, largest absolute value and non-finite elements, layer by layer.

A watched step runs the same schedule, on a `Watch` in the place of the kernel package.  It launches what the package
launches and, behind the launch that writes one of the tensors below, a kernel that reads it.  So each buffer is read
while it is alive, whatever shares its bytes later; and no byte of the training changes.

x[p], qkv[l], att[l], fch[l]   the forward pass, by their names in tables.py
dx[p]                          the gradient of the loss, loss scale included, at x[p]
each parameter                 its gradient when the update begins, the weights, and the update before it is rounded

Of several ranks each reads what it computes: activations of its own sequences, parameters of its own share, at ZeRO-0
all of them.  What the kernels found is put together on the host.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.model.buffers import Acts, Params, State, param_entries

FORWARD = ("x", "qkv", "att", "fch")
MATRICES = [field.name for field in dataclasses.fields(Params) if field.metadata["decay"]]
ACTIVATION = ("rms", "absmax", "nonfinite")
PARAMETER = ("grad_rms", "grad_absmax", "nonfinite", "weight_rms", "update_ratio")

Record = dict[str, dict[str, dict[str, list[Any]]]]  # kind -> tensor -> column -> a number for each point or layer


def slots(dims: dict[str, int]) -> list[tuple[str, int]]:
    """(name, index) of every activation that is watched, in the order of their statistics in memory."""
    counts = {"x": dims["S"], "qkv": dims["L"], "att": dims["L"], "fch": dims["L"], "dx": dims["S"]}
    return [(name, i) for name, n in counts.items() for i in range(n)]


class Watch:
    """K for the schedule of a watched step; `over` names the package behind it."""

    def __init__(self, K: Any, state: State, acts: Acts, dims: dict[str, int]):
        self.buffers: tuple[Tensor, Tensor] = (state.act_stats, state.par_stats)
        for buffer in self.buffers:
            K.fill(buffer, 0.0)
        self._slots = {key: i for i, key in enumerate(slots(dims))}
        self._names = {id(t): (name, i) for name in FORWARD for i, t in enumerate(getattr(acts, name))}
        self._acts, self._points = acts, dims["S"]  # the tensors stay, so that their ids do
        self._shared_out = dims["zero"] > 0  # whether a rank updates its share of the parameters, or all of them
        self._elements = [
            getattr(acts, name)[i].numel() if name != "dx" else acts.dx.numel() for name, i in self._slots
        ]
        self._entries = list(param_entries(dims))
        rows = ((e, dims["V"] if e.name == "wte" else e.shape[0]) for e in self._entries)
        self._spans = [(e.offset, e.offset + n * math.prod(e.shape[1:])) for e, n in rows]

    def over(self, K: Any, acc: bool) -> "Watch":
        """Begin a micro-step on top of K; with acc its statistics are joined to those of the ones before."""
        self._K, self._acc, self._taken, self._point = K, acc, set[tuple[str, int]](), self._points
        return self

    def __getattr__(self, launcher: str) -> Callable[..., None]:
        launch = getattr(self._K, launcher)

        def watched(*args: Any, **keywords: Any) -> None:
            if launcher == "adamw":
                self._parameters(*args)
            launch(*args, **keywords)
            if launcher == "layernorm_bwd":  # each leaves dx at the next lower point of the residual stream
                self._point -= 1
                self._take(("dx", self._point), args[0])
            for argument in args:
                if id(argument) in self._names:
                    self._take(self._names[id(argument)], argument)

        return watched

    def _take(self, key: tuple[str, int], tensor: Tensor) -> None:
        """The first launch that has a tensor among its arguments writes it; what follows reads it, or writes it again
        for the backward pass.
        """
        if key not in self._taken:
            self._taken.add(key)
            self._K.tensor_stats(self.buffers[0][self._slots[key]], tensor, self._acc)

    def _parameters(self, w: Tensor, m: Tensor, v: Tensor, low: Any, g: Tensor, stats: Tensor, hyper: Tensor, rng: Any,
                    first: int, decay: float, *betas_eps: float) -> None:  # fmt: skip
        for out, (start, stop) in zip(self.buffers[1], self._spans, strict=True):
            r = slice(max(start, first) - first, min(stop, first + w.numel()) - first)
            if r.start < r.stop:
                self._K.parameter_stats(out, w[r], m[r], v[r], g[r], stats, hyper, decay, *betas_eps)

    def read(self, partials: Sequence[Tensor], micro_steps: int, control: ControlGroup) -> Record:
        """The record of a step from host copies of `buffers`, the same on all ranks, which call it together; a first
        part alone gives the activations alone.
        """
        record: Record = {"activations": {}, "parameters": {}}
        found = control.all_gather([_of_rank(part).tolist() for part in partials])
        names, elements = [name for name, _ in self._slots], np.array(self._elements) * micro_steps * len(found)
        columns = _finish([np.array(parts[0]) for parts in found], elements)
        _enter(record["activations"], names, dict(zip(ACTIVATION, columns, strict=True)))
        if len(partials) > 1:
            ranks = found if self._shared_out else found[:1]
            elements = np.array([stop - start for start, stop in self._spans])
            columns = _finish([np.array(parts[1]) for parts in ranks], elements)
            _enter(record["parameters"], [e.name for e in self._entries], dict(zip(PARAMETER, columns, strict=True)))
        return record


def _of_rank(partials: Tensor) -> np.ndarray:
    """[slots, 3 or 5] from a rank's partial results [slots, 3 or 5, P]: sums in float64, the second a maximum."""
    parts = partials.numpy().astype(np.float64)
    out = parts.sum(-1)
    out[:, 1] = parts[:, 1].max(-1)
    return out


def _finish(ranks: Sequence[np.ndarray], elements: np.ndarray) -> list[np.ndarray]:
    """Columns from what each rank found of its part of the elements."""
    squares, _, bad, *more = np.sum(ranks, axis=0).T
    largest = np.max([rank[:, 1] for rank in ranks], axis=0)
    columns = [np.sqrt(squares / np.maximum(elements - bad, 1)), largest, bad]
    if more:
        weights, updates = more
        ratio = np.sqrt(np.divide(updates, weights, out=np.zeros_like(updates), where=weights != 0))
        columns += [np.sqrt(weights / elements), ratio]
    return columns


def _enter(table: dict[str, dict[str, list[Any]]], names: list[str], columns: dict[str, np.ndarray]) -> None:
    for column, values in columns.items():
        for name, value in zip(names, values.tolist(), strict=True):
            exact = int(value) if column == "nonfinite" else float(f"{value:.5g}") if math.isfinite(value) else None
            table.setdefault(name, {}).setdefault(column, []).append(exact)


# ---- what a record says ----


def first_non_finite(record: Record) -> str:
    """The first tensor, as a step computes them, that has non-finite elements, with their number; empty if none has."""
    acts = record["activations"]
    for name, i in _in_order(len(acts["qkv"]["rms"])):
        if count := acts[name]["nonfinite"][i]:
            return f"{place(name, i)} ({count:,} elements)"
    for name, columns in record["parameters"].items():
        for i, count in enumerate(columns["nonfinite"]):
            if count:
                return f"gradient of {label(name, i, columns)} ({count:,} elements)"
    return ""


def _in_order(layers: int) -> Iterator[tuple[str, int]]:
    yield "x", 0
    for l in range(layers):
        yield from (("qkv", l), ("att", l), ("x", 2 * l + 1), ("fch", l), ("x", 2 * l + 2))
    for point in reversed(range(2 * layers + 1)):
        yield "dx", point


def place(name: str, i: int) -> str:
    """Where an activation stands in GPT-2."""
    if name in ("x", "dx"):
        where = "the embedding" if i == 0 else f"layer {(i - 1) // 2}{chr(39) + 's attention' if i % 2 else ''}"
        return f"x after {where}" if name == "x" else f"gradient at x after {where}"
    return f"{name} of layer {i}"


def label(name: str, i: int, columns: dict[str, list[Any]]) -> str:
    """qkvw[3], or wte where there is one only."""
    return f"{name}[{i}]" if len(columns["nonfinite"]) > 1 else name


def summary(record: Record) -> str:
    """One line of extremes: the largest activation, gradient and update of a matrix (biases begin at 0, so that early
    ratios of theirs are large and mean nothing), and the first tensor that is not finite.
    """
    acts, params = record["activations"], record["parameters"]
    columns = {
        "activation": [(v, place(name, i)) for name in FORWARD for i, v in enumerate(acts[name]["absmax"])],
        "gradient rms": [(v, label(n, i, c)) for n, c in params.items() for i, v in enumerate(c["grad_rms"])],
        "update/weight": [
            (v, label(n, i, params[n])) for n in MATRICES for i, v in enumerate(params[n]["update_ratio"])
        ],
    }
    parts = []
    for what, values in columns.items():
        most, where = max((math.inf if v is None else v, where) for v, where in values)
        parts.append(f"largest {what} {most:.3g} in {where}")
    bad = first_non_finite(record)
    return " | ".join(parts + ([f"not finite: {bad}"] if bad else []))


def table(record: Record) -> str:
    """All of a record, a line a tensor."""
    lines = []
    for kind, columns in (("activations", ACTIVATION), ("parameters", PARAMETER)):
        lines += [f"{kind:<14}" + "".join(f"{column:>14}" for column in columns)]
        for name, values in record[kind].items():
            for i, row in enumerate(zip(*(values[column] for column in columns), strict=True)):
                shown = name + (f"[{i}]" if len(values["nonfinite"]) > 1 else "")
                cells = (f"{'-' if v is None else format(v, '.4g' if isinstance(v, float) else ','):>14}" for v in row)
                lines.append(f"{shown:<14}" + "".join(cells))
        lines.append("")
    bad = first_non_finite(record)
    return "\n".join([*lines, f"first non-finite: {bad or 'none'}"])
