"""Draws docs/pictures from the record of figures; `python -m benchmarks.results render` calls `draw`."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.losses import pairs
from benchmarks.speed.sizes import SIZES

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
LOSSES = Path(__file__).parent / "losses"
MACHINE = "h100"  # the section that is drawn
NAMES = {  # of sizes and of programs
    "d12": "124M", "d24": "350M", "d36": "774M", "d48": "1558M",
    "torch": "PyTorch", "bf16": "bf16", "fp8": "fp8", "fp8_head": "fp8, logits in bf16", "muon": "bf16, Muon",
    "torch_muon": "PyTorch, Muon", "torchao_tensorwise": "torchao, tensorwise", "torchao_rowwise": "torchao, rowwise",
    "first_step": "gpt2_triton", "first_step_torch": "PyTorch",
}  # fmt: skip
COLORS = {"torch": "#E69F00", "bf16": "#0072B2", "fp8": "#56B4E9"}
CURVES = {"PyTorch": "#E69F00", "bf16": "#0072B2", "fp8": "#56B4E9", "muon, fp8": "#009E73"}  # arms of minutes_d12
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
        axes.barh(at, ms, 0.38, color=color, label=f"{f['precision']}: step {f['step_ms']:.1f} ms{energy}")
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
    """Return speed, memory, and training loss over minutes, each beside PyTorch's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.9), layout="constrained")
    speed, memory, loss = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
    sizes, rates, gib = figures["sizes"], figures["tok_s"], figures["gib"]
    ratios = {arm: [a / b for a, b in zip(rates[arm], rates["torch"])] for arm in rates}
    _bars(speed, sizes, ratios, {arm: [f"{rate / 1e3:.3g}k tokens/s" for rate in rates[arm]] for arm in rates})
    speed.set(title="speed, PyTorch = 1", ylim=(0, 1.45 * max(map(max, ratios.values()))))
    _bars(memory, sizes, gib, {arm: [f"{value:.1f}" for value in gib[arm]] for arm in gib})
    memory.set(title="GPU memory, GiB", ylim=(0, 1.45 * max(map(max, gib.values()))))
    for arm, (minutes, losses) in figures["curves"].items():
        loss.plot(minutes, losses, color=CURVES[arm], lw=1.4, label=arm)
    lowest = min(min(losses) for _, losses in figures["curves"].values())
    loss.set(title="124M: training loss over minutes", xlabel="minutes", ylim=(lowest - 0.05, lowest + 2.5))
    for axes in (speed, memory, loss):
        axes.legend(frameon=False, fontsize=8.5, loc="upper right" if axes is loss else "upper center")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _bars(axes: Any, sizes: Sequence[str], values: Figures, labels: Mapping[str, Sequence[str]]) -> None:
    """Draw one group of bars per size, one bar per program with its label in it."""
    width = 0.8 / len(values)
    for i, arm in enumerate(values):
        at = [group + (i - (len(values) - 1) / 2) * width for group in range(len(sizes))]
        axes.bar(at, values[arm], 0.94 * width, color=COLORS[arm], label=NAMES[arm])
        for x, label in zip(at, labels[arm]):
            color = "white" if arm == "bf16" else "black"
            axes.text(x, 0, f"  {label}", rotation=90, ha="center", va="bottom", fontsize=9, color=color)
    axes.set_xticks(range(len(sizes)), [NAMES[size] for size in sizes])


def of_comparison(section: Figures) -> Figures:
    """Return what `comparison` draws; KeyError if something is not measured."""
    sizes = [size for size in SIZES if f"steps.{size}.torch.tok_s" in section] or [*SIZES][:1]

    def of(name: str) -> Figures:
        return {arm: [section[f"steps.{size}.{arm}.{name}"] for size in sizes] for arm in COLORS}

    rows = pairs.read_results(LOSSES / "minutes_d12.jsonl")
    return dict(sizes=sizes, tok_s=of("tok_s"), gib=of("gib"), curves={arm: pairs.curve(rows, arm) for arm in CURVES})


def of_operations(section: Figures) -> list[Figures]:
    """Return what `operations` draws; KeyError if it is not measured."""
    found = list[Figures]()
    for arm in ("bf16", "fp8"):
        key = f"ops.d12.{arm}."
        names = [k.split(".")[3] for k in section if k.startswith(key) and k.endswith(".ms") and k != f"{key}ms"]
        rows = [dict(name=n, ms=section[f"{key}{n}.ms"], floor_ms=section[f"{key}{n}.floor_ms"]) for n in names]
        step = dict(precision=arm, step_ms=section[f"{key}ms"], joules=section.get(f"{key}joules"))
        found.append(dict(title=NAMES["d12"], operations=rows) | step)
    return found


DRAWN: dict[str, tuple[Callable[[Figures], Any], Callable[[Any], Any]]] = {
    "comparison": (of_comparison, comparison),
    "ops_d12": (of_operations, operations),
}


def draw(record: Mapping[str, Figures], check: bool) -> list[str]:
    """Draw the pictures that are not of the record's figures, unless `check`, and return their names.

    A picture carries a digest of its figures.  One that the record has no figures for stays.
    """
    changed = []
    for name, (figures_of, picture) in DRAWN.items():
        try:
            figures = figures_of(record.get(MACHINE, {}))
        except KeyError:
            continue
        file, digest = PICTURES / f"{name}.png", hashlib.sha256(json.dumps(figures).encode()).hexdigest()
        if not file.exists() or digest.encode() not in file.read_bytes():
            changed.append(f"docs/pictures/{name}.png: drawn again")
            if not check:
                picture(figures).savefig(file, dpi=150, metadata={"Comment": digest})
    return changed
