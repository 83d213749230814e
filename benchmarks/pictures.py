"""Draws docs/pictures from the record of figures;
`python -m benchmarks.results render` calls `draw`.
"""

import hashlib
import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.losses import pairs, ratio
from benchmarks.record import ROOT
from benchmarks.speed.sizes import MODELS, work_of
from gpt2_triton import kernels
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.device import GPUS
from gpt2_triton.model.arena import GIB
from gpt2_triton.model.memory_plan import CONTEXT_BYTES, MODULE_BYTES, choose_recompute, plan_memory

PICTURES = ROOT / "docs" / "pictures"
LOSSES = ROOT / "benchmarks" / "losses"
MINUTES = LOSSES / "minutes_modern_prose.jsonl"
SCALE = LOSSES / "scale.jsonl"
MACHINE = "h200"  # the section that is drawn
NAMES = {  # sizes and programs: their names in tables and pictures
    "d12": "124M", "d24": "350M", "d36": "774M", "d48": "1558M", "llama_c768": "Llama 114M",
    "llama_1b": "Llama 1.24B", "torch": "PyTorch", "bf16": "bf16", "fp8": "fp8",
    "fp8_head": "fp8, head in bf16", "muon": "bf16, Muon", "bf16_muon": "bf16, Muon",
    "fp8_muon": "fp8, Muon", "torch_muon": "PyTorch, Muon",
    "torchao_tensorwise": "torchao, tensorwise", "torchao_rowwise": "torchao, rowwise",
    "PyTorch_chunks": "PyTorch, loss in chunks",
    "none": "fp8", "gelu_ln": "fp8", "gelu_ln_qkv_9": "fp8",
}  # fmt: skip
COLORS = {"torch": "#E69F00", "bf16": "#0072B2", "fp8": "#56B4E9"}
COMPARED = {
    "torch": "PyTorch, bf16",
    "bf16": "gpt2_triton, bf16",
    "fp8": "gpt2_triton, fp8",
}
RUNS = {  # arms of MINUTES: name, color, marker; points from marker to label
    "PyTorch, AdamW": ("PyTorch, GPT-2, AdamW", "#E69F00", "s", -7),
    "PyTorch, Muon": ("PyTorch, GPT-2, Muon", "#CC79A7", "D", -7),
    "PyTorch, modern, Muon": ("PyTorch, modern block, Muon", "#D55E00", "^", -7),
    **dict.fromkeys(
        ("modern, fp8, a fifth", "modern, fp8, 45%", "modern, fp8, 60%", "modern, fp8"),
        ("gpt2_triton, modern block, Muon, fp8:\n36, 45, 60, 100% of the steps", "#009E73", "o", 7),
    ),
}

Figures = Mapping[str, Any]


def operations(figures: Figures) -> Any:
    """Return the picture of a step: for each operation a bar in bf16 and one in fp8, each
    with a line at its floor.
    """
    steps = [
        {k.removeprefix(f"ops.d12.{arm}."): v for k, v in figures.items() if f".{arm}." in k}
        for arm in ("bf16", "fp8")
    ]
    most = {
        k: max(step.get(k, 0.0) for step in steps)
        for step in steps
        for k in step
        if k.endswith(".ms")
    }
    names = sorted(
        (name for name in most if most[name] > 0.003 * steps[0]["ms"]), key=most.__getitem__
    )
    figure = new_figure(8, 0.46 * len(names) + 1.6)
    axes = figure.subplots()
    for arm, step, shift in zip(("bf16", "fp8"), steps, (0.2, -0.2)):  # bf16 above fp8
        at = [row + shift for row in range(len(names))]
        times, floors = (
            [step.get(name[:-2] + key, 0.0) for name in names] for key in ("ms", "floor_ms")
        )
        axes.barh(at, times, 0.38, color=COLORS[arm], label=f"{arm}: step {step['ms']:.1f} ms")
        for y, ms, least in zip(at, times, floors, strict=True):
            axes.annotate(
                f"{ms:.1f} ms" if ms else "",
                (max(ms, least), y),
                (4, -3),
                textcoords="offset points",
                size=8,
            )
        label = "floor" if arm == "bf16" else ""
        axes.vlines(
            floors, [y - 0.19 for y in at], [y + 0.19 for y in at], color="black", label=label
        )
    axes.set_yticks(range(len(names)), [name.removesuffix(".ms") for name in names])
    axes.set(
        xlabel="ms per step",
        title=f"124M on one {MACHINE.upper()}, a step of 65,536 tokens",
        xlim=(0, 1.15 * max(most.values())),
    )
    finish(axes, "lower right")
    return figure


def comparison(figures: Figures) -> Any:
    """Return the picture of speed, memory, and loss over minutes: gpt2_triton in
    bf16 and fp8, and PyTorch.
    """
    sizes = [size for size in MODELS if f"steps.{size}.torch.tok_s" in figures] or ["d12"]
    figure = new_figure(12, 3.9)
    speed, memory, loss = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
    for i, (arm, color) in enumerate(COLORS.items()):
        at = [group + 0.27 * (i - 1) for group in range(len(sizes))]
        rates = [figures[f"steps.{size}.{arm}.tok_s"] for size in sizes]
        planned = recipe_memory(figures)
        gib = [planned.get(f"{size}.{arm}", figures[f"steps.{size}.{arm}.gib"]) for size in sizes]
        ratios = [
            rate / figures[f"steps.{size}.torch.tok_s"]
            for size, rate in zip(sizes, rates, strict=True)
        ]
        texts = [f"{rate / 1e3:.3g}k tokens/s" for rate in rates], [f"{value:.1f}" for value in gib]
        for axes, values, labels in zip((speed, memory), (ratios, gib), texts, strict=True):
            bars = axes.bar(at, values, 0.25, color=color, label=COMPARED[arm])
            axes.bar_label(
                bars,
                labels,
                label_type="center",
                rotation=90,
                color="black" if arm != "bf16" else "white",
            )
    for axes, title in ((speed, "speed, PyTorch = 1"), (memory, "GPU memory, GiB")):
        axes.set_xticks(range(len(sizes)), [NAMES[size] for size in sizes])
        axes.set(title=title, ylim=(0, 1.45 * axes.dataLim.y1))
        finish(axes, "upper center")
    memory.set_xlabel("gpt2_triton: memory.recompute auto")
    final_losses(loss)
    return figure


def recipe_memory(figures: Figures) -> dict[str, float]:
    """Return the GiB of "SIZE.ARM" at the level of memory.recompute auto on
    MACHINE, which a recipe takes there.

    It is the plan, and what a run was measured to take beside its plan.
    """
    budget = int(GPUS[MACHINE].memory * GIB) - CONTEXT_BYTES - MODULE_BYTES
    found = {}
    for size in MODELS:
        for arm in ("bf16", "fp8"):
            key = f"steps.{size}.{arm}"
            if f"{key}.planned" in figures:
                config = work_of(size, recompute="auto", precision=arm).config()
                shape = StepShape.of(config)
                plan, _ = plan_memory(
                    choose_recompute(config, kernels, budget, shape), kernels, shape
                )
                beside = figures[f"{key}.gib"] - figures[f"{key}.planned"]
                found[f"{size}.{arm}"] = round(plan.total / GIB + beside, 1)
    return found


def final_losses(axes: Any) -> None:
    """Draw the validation loss at the end of each run over its minutes on an H200, steps times
    the median step time.  Of PyTorch's GPT-2, 90 steps alone are timed.
    """
    rows = pairs.read_results(MINUTES)
    points: dict[tuple[str, str, str, int], list[tuple[float, float]]] = {}
    for arm, looks in RUNS.items():
        mine = [row for row in rows if row["arm"] == arm]
        timed = [row for row in rows if row["arm"] == f"{arm}, 90 steps"] or mine
        ms = statistics.fmean(row["ms"] for row in timed if row["ms"])
        loss = statistics.fmean(row["val_loss"] for row in mine)
        points.setdefault(looks, []).append((mine[0]["steps"] * ms / 60e3, loss))
    for (name, color, marker, away), at in points.items():
        axes.plot(*zip(*at, strict=True), marker=marker, color=color, lw=1.4, label=name)
        for minutes, loss in at:
            axes.annotate(
                f"{loss:.2f}",
                (minutes, loss),
                (away, 0),
                textcoords="offset points",
                ha="left" if away > 0 else "right",
                va="center",
                size=8.5,
            )
    longest = axes.dataLim.x1
    low, high = axes.dataLim.intervaly
    axes.set(
        title="validation loss at a run's end",
        xlabel="minutes on one H200",
        ylabel="nats per token",
        xlim=(0, 1.1 * longest),
        ylim=(low - 0.1 * (high - low), high + 0.55 * (high - low)),  # room for the legend
    )
    finish(axes, "upper right")


def scale(_: Figures) -> Any:
    """Return the picture of scale.yaml: losses over tokens with their fits, and AdamW's
    tokens divided by Muon's.
    """
    figure = new_figure(12, 3.9)
    loss, tokens = figure.subplots(1, 2)
    sizes = ratio.sizes_of(pairs.read_results(SCALE))
    millions = [60 * 1.2**i for i in range(29)]
    for size, color in zip(sizes, ("#E69F00", "#56B4E9", "#0072B2"), strict=True):
        for name, line, marker in (("AdamW", "--", "s"), ("Muon", "-", "o")):
            at = [(run.tokens, run.loss) for run in size.runs if run.optimizer == name.lower()]
            loss.plot(*zip(*at, strict=True), marker, color=color, ms=4)
            fitted = [size.fit.loss(name.lower(), x) for x in millions]
            loss.plot(
                millions,
                fitted,
                line + marker,
                markevery=[],  # in the legend alone
                color=color,
                ms=4,
                lw=1.2,
                label=f"{size.name}, {name}",
            )
        middle, low, high = zip(*(size.fit.ratio(x) for x in millions), strict=True)
        tokens.plot(millions, middle, color=color, lw=1.4, label=size.name)
        tokens.fill_between(millions, low, high, color=color, alpha=0.15, lw=0)
    for axes, title, to in (
        (loss, "validation loss, nats per token", "upper right"),
        (tokens, "AdamW's tokens / Muon's, 95% intervals", "lower left"),
    ):
        axes.set(title=title, xlabel="million tokens", xscale="log")
        finish(axes, to)
        at = [60, 120, 240, 1000, 10_000]
        axes.set_xticks(at, [f"{x:,}" for x in at])
        axes.minorticks_off()
    tokens.set(yscale="log", ylim=(0.2, 8))
    at = [0.25, 0.5, 1, 2, 4, 8]
    tokens.set_yticks(at, at)
    tokens.minorticks_off()
    tokens.axhline(1, color="black", lw=0.8)
    return figure


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # `run` does not need matplotlib

    return Figure(figsize=(width, height), layout="constrained")


def finish(axes: Any, legend: str) -> None:
    axes.legend(loc=legend, frameon=False, fontsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)


# file in docs/pictures: prefix of the keys that it draws, function that
# draws it, losses that it draws
DRAWN = {
    "comparison": ("steps.", comparison, (MINUTES,)),
    "ops_d12": ("ops.d12.", operations, ()),
    "scale": ("none", scale, (SCALE,)),
}


def draw(record: Mapping[str, Figures], check: bool) -> list[str]:
    """Draw the pictures with changed figures, and return a line for
    each; with `check`, draw nothing.

    A picture file carries a digest of its figures.  If the record lacks a
    figure, the picture stays as it is.
    """
    changed = []
    for name, (kind, picture, losses) in DRAWN.items():
        figures = {
            key: value for key, value in record.get(MACHINE, {}).items() if key.startswith(kind)
        }
        drawn_from = json.dumps(figures | recipe_memory(figures)).encode()
        drawn_from += b"".join(file.read_bytes() for file in losses)
        digest = hashlib.sha256(drawn_from).hexdigest()
        file = PICTURES / f"{name}.png"
        drawn_before = file.read_bytes() if file.exists() else b""
        if digest.encode() in drawn_before:
            continue
        try:
            drawn = picture(figures)
        except KeyError:
            continue
        changed.append(f"docs/pictures/{name}.png: drawn again")
        if not check:
            drawn.savefig(file, dpi=150, metadata={"Comment": digest})
    return changed
