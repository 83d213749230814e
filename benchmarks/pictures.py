"""Draws pictures of measured figures; `python -m benchmarks.pictures` draws docs/pictures again.

The figures of docs/pictures/NAME.png stand in NAME.json beside it, with the date and the commit of the measurement.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
COLORS = {"gpt2_triton": "#0072B2", "PyTorch": "#E69F00", "llm.c": "#999999"}
FLOOR, MEASURED, FP8 = "#1f4e79", "#9db7d5", "#f2b880"

Figures = Mapping[str, Any]


def operations(figures: Sequence[Figures]) -> Any:
    """Return the picture of a step in one or two precisions: a bar for each per operation, with a line at its floor."""
    from matplotlib.figure import Figure

    longest = max(f["step_ms"] for f in figures)
    kinds = [{o["name"]: o for o in f["operations"]} for f in figures]
    most = {name: max(k[name]["ms"] for k in kinds if name in k) for k in kinds for name in k}
    names = sorted((name for name in most if most[name] > 0.003 * longest), key=most.__getitem__)
    figure = Figure(figsize=(8, 0.46 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    for i, (f, kind, color) in enumerate(zip(figures, kinds, (MEASURED, FP8))):
        at = [row + 0.4 * (0.5 - i) for row in range(len(names))]  # the first above the second
        ms, floors = ([kind[name][key] if name in kind else 0.0 for name in names] for key in ("ms", "floor_ms"))
        energy = "" if f.get("joules") is None else f", {f['joules']:.1f} J"
        label = f"{f['precision']}: step {f['step_ms']:.1f} ms{energy}"
        axes.barh(at, ms, 0.38, color=color, label=label)
        axes.vlines(floors, [y - 0.19 for y in at], [y + 0.19 for y in at], color=FLOOR, lw=2,
                    label="" if i else "floor")  # fmt: skip
        for y, value, floor in zip(at, ms, floors):
            axes.text(max(value, floor), y, f"  {value:.1f} ms" if value else "", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="ms per step", title=figures[0]["title"], xlim=(0, 1.15 * max(most.values())))
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def comparison(figures: Figures) -> Any:
    """Return speed and memory beside PyTorch and llm.c, and the difference of the loss from PyTorch's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.9), layout="constrained")
    speed, memory, loss = figure.subplots(1, 3, width_ratios=(1.25, 1.25, 1))
    rates, sizes = figures["tokens_per_second"], figures["sizes"]
    relative = {name: [a / b for a, b in zip(rates[name], rates["PyTorch"])] for name in rates}
    labels = {name: [f"{value / 1e3:.3g}k tokens/s" for value in values] for name, values in rates.items()}
    _bars(speed, sizes, relative, labels)
    speed.set(title="speed, PyTorch = 1", ylim=(0, 1.3), yticks=(0, 0.5, 1))
    gib = figures["memory_gib"]
    _bars(memory, sizes, gib, {name: ["not measured" if v is None else f"{v:.1f}" for v in gib[name]] for name in gib})
    memory.set(title="GPU memory, GiB", ylim=(0, 1.2 * max(v for values in gib.values() for v in values if v)))
    for axes in (speed, memory):
        axes.legend(loc="upper center", ncols=3, frameon=False, fontsize=8.5, columnspacing=1.2)
    losses = figures["loss"]
    for (name, values), style in zip(losses["ours"].items(), ("-o", "--s")):
        percent = [100 * (a / b - 1) for a, b in zip(values, losses["PyTorch"])]
        loss.plot(losses["steps"], percent, style, color=COLORS["gpt2_triton"], ms=4, label=name)
    loss.axhline(0, color=COLORS["PyTorch"], lw=2, label="PyTorch, autocast")
    loss.set(title="124M: loss above PyTorch's, %", xlabel="step", ylim=(-1, 1.6), xlim=(50, 550))
    loss.legend(loc="upper right", frameon=False, fontsize=8.5)
    for axes in (speed, memory, loss):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10.5)
    return figure


def _bars(
    axes: Any, sizes: Sequence[str], values: Mapping[str, Sequence[float | None]], labels: Mapping[str, Sequence[str]]
) -> None:
    """Draw one group of bars per size, one bar per program with its label in it; None draws the label alone."""
    width = 0.8 / len(values)
    for i, name in enumerate(values):
        at = [group + (i - (len(values) - 1) / 2) * width for group in range(len(sizes))]
        axes.bar(at, [v or 0 for v in values[name]], 0.94 * width, color=COLORS[name], label=name)
        for x, value, label in zip(at, values[name], labels[name]):
            color = "white" if value and name == "gpt2_triton" else "black"
            axes.text(x, 0, f"  {label}", rotation=90, ha="center", va="bottom", fontsize=9, color=color)
    axes.set_xticks(range(len(sizes)), sizes)


DRAWN: dict[str, Callable[[Figures], Any]] = {
    "comparison": comparison,
    "ops_d12": lambda figures: operations(figures["precisions"]),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name, draw in DRAWN.items():
        draw(json.loads((PICTURES / f"{name}.json").read_text())).savefig(PICTURES / f"{name}.png", dpi=150)
        print(f"wrote {PICTURES / name}.png")


if __name__ == "__main__":
    main()
