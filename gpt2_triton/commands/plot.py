"""`plot`: loss, learning rate, gradient norm, speed and scores of runs, from their metrics.jsonl, as one picture.

The colours are Okabe and Ito's, which remain distinct to colour-blind readers.  Equal curves are drawn over each other
in alternate dashes.  The same runs give the same file: it holds no date and no random name.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from cyclopts import Parameter

from gpt2_triton.config.load import read_yaml
from gpt2_triton.console import printable
from gpt2_triton.errors import ConfigError
from gpt2_triton.training.metrics import METRICS, read_metrics

FORMATS: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # metadata
NAME_CHARS = 28  # of a run's name in a line of the legend
DASH = 4.0  # of equal curves, in widths of the line
SMOOTH_FROM = 200  # points; a shorter curve is readable without smoothing
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

TASK_TITLES = {"lambada": "LAMBADA", "arc_easy": "ARC-Easy", "piqa": "PIQA", "winogrande": "WinoGrande"}

CURVES = {path.stem: path for path in sorted(Path(__file__).with_name("curves").glob("*.json"))}  # for --beside
NOT_COMPARABLE = "not comparable: the run's validation data is not FineWeb in GPT-2's tokens"

# OpenAI's checkpoints: loss on FineWeb's validation shard of llm.c, HellaSwag (acc_norm), from llm.c's vislog
OPENAI = {"124M": (3.4250, 0.2945), "350M": (3.0831, 0.3752), "774M": (3.0006, 0.4320), "1558M": (2.8313, 0.4889)}
LEVEL_DASHES = dict(zip(OPENAI, ((6, 2), (3, 2), (1, 2), (6, 2, 1, 2)), strict=True))  # equal in all panels


class Run(NamedTuple):
    name: str
    directory: Path  # resolved
    records: list[dict[str, Any]]
    config: dict[str, Any]  # the content of config.yaml; empty if there is none
    tokens_per_step: float | None

    def points(self, key: str, x_scale: float = 1.0) -> np.ndarray:
        """Return (x_scale * step, value) [n, 2] of the steps that have a finite value."""
        found = [(r["step"] * x_scale, r[key]) for r in self.records if r.get(key) is not None]
        return np.array(found, np.float64).reshape(-1, 2)

    def on_fineweb(self) -> bool:
        """Return whether the validation data is FineWeb in GPT-2's tokens, by its path; FineWeb-Edu is other text."""
        data = self.config.get("data", {})
        path = str(data.get("val")).lower()
        return data.get("tokenizer") == "gpt2" and "fineweb" in path and not re.search("fineweb[-_]?edu", path)


class Reference(NamedTuple):
    """A published run: validation losses on FineWeb's validation shard."""

    name: str
    title: str
    note: str  # the model's architecture
    points: np.ndarray  # (tokens, validation loss) [n, 2]


def draw_runs(paths: Sequence[Path], out: Path, openai: bool = False, beside: Sequence[str] = ()) -> list[str]:
    """Draw all runs over tokens, or over steps if the tokens of a run are unknown; return lines that compare them with
    the curves `beside`, names of CURVES, which are drawn as far as the runs have come, and warnings.

    `openai` adds OpenAI's GPT-2 as horizontal lines.  Without it, those near the curves are drawn if the validation
    data of every run is FineWeb in GPT-2's tokens.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(f"-o: {out} does not end in {', '.join(FORMATS)}; choose one of them")
    references = [read_reference(name) for name in beside]
    runs = _distinct_names([read_run(path) for path in paths])
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    by_tokens = all(run.tokens_per_step for run in runs)
    if references and not by_tokens:
        raise ConfigError("plot: --beside needs the tokens of every run; leave it out, or the runs without")
    scales = [run.tokens_per_step or 1.0 if by_tokens else 1.0 for run in runs]
    automatic = not openai and all(run.on_fineweb() for run in runs)
    panels = ["lr", "norm", "speed"] + ["hellaswag"] * any(len(run.points("hellaswag")) for run in runs)
    tasks = [task for task in TASK_TITLES if any(len(run.points(f"{task}_acc")) for run in runs)]
    figure = Figure(figsize=(11, 9 if tasks else 7), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    rows = [["loss"], panels, *([tasks] if tasks else [])]
    columns = math.lcm(*map(len, rows))
    mosaic: list[Any] = [[name for name in row for _ in range(columns // len(row))] for row in rows]
    axes = figure.subplot_mosaic(mosaic, height_ratios=[2, 1, 1][: len(rows)])
    levels = _draw_loss(axes["loss"], runs, scales, openai, automatic, references)
    _draw_lines(axes["lr"], runs, scales, "lr", "learning rate")
    _draw_lines(axes["norm"], runs, scales, "norm", "gradient norm")
    _draw_lines(axes["speed"], runs, scales, "tok_s", "tokens per second")
    if "hellaswag" in axes:
        levels += _draw_hellaswag(axes["hellaswag"], runs, scales, openai or automatic)
    for task in tasks:
        _draw_scores(axes[task], [run.points(f"{task}_acc", x) * [1, 100] for run, x in zip(runs, scales, strict=True)])
        axes[task].set_title(f"{TASK_TITLES[task]}, %", loc="left", fontsize=10)
    last = max(panel.dataLim.x1 for panel in axes.values()) or 1.0  # a run that has only begun
    for name, panel in axes.items():
        panel.set_xlim(-0.01 * last, 1.01 * last)  # equal in all panels; markers at the ends are not cut
        _finish(panel, "tokens" if by_tokens else "steps", 8 if name == "loss" else 3)
    _add_legend(figure, runs, [size for size in OPENAI if size in levels], "hellaswag" in axes, references)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "gpt2_triton"}):
            figure.savefig(out, dpi=150, metadata=FORMATS[out.suffix])
    except OSError as error:
        raise ConfigError(f"plot: cannot write {out}: {error.strerror}; choose another -o") from error
    lines = [compare(run, reference) for reference in references for run in runs]
    if openai:
        others = [run.name for run in runs if not run.on_fineweb()]
        lines += [f"{name}: its losses and those of OpenAI's GPT-2 are {NOT_COMPARABLE}" for name in others]
    return lines


def read_reference(name: str) -> Reference:
    """Return a curve of CURVES; ConfigError for another name."""
    if name not in CURVES:
        raise ConfigError(f"--beside: unknown curve {name}; known are {', '.join(CURVES)}")
    curve = json.loads(CURVES[name].read_text())
    points = np.array(curve["val_loss"], np.float64) * [curve["tokens_per_step"], 1]
    return Reference(name, curve["title"], curve["note"], points)


def compare(run: Run, reference: Reference) -> str:
    """Return a line with the run's last validation loss and the reference's at as many tokens, between its points on a
    straight line.
    """
    val = run.points("val_loss", run.tokens_per_step or 1.0)
    if not len(val):
        return f"{run.name}: no validation loss to lay beside {reference.name}"
    tokens, loss = val[-1]
    if tokens > reference.points[-1, 0]:
        there = f"ended at {reference.points[-1, 1]:.4f} after {_short(reference.points[-1, 0])}"
    else:
        there = f"has {np.interp(tokens, *reference.points.T):.4f} there"
    other = "" if run.on_fineweb() else f"; {NOT_COMPARABLE}"
    here = f"{run.name}: val loss {loss:.4f} at {_short(tokens)} tokens"
    return f"{here}; {reference.name} {there} ({reference.note}){other}"


def read_run(path: Path) -> Run:
    """Read a run directory, or its metrics.jsonl alone; ConfigError if it has no losses."""
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: no {METRICS} there; expected a run directory")
    records = read_metrics(file)
    if not any(r.get(key) is not None for r in records for key in ("loss", "val_loss")):
        raise ConfigError(f"{file}: holds no losses yet; plot it after a step")
    tokens = next((r["tokens"] / r["step"] for r in records if r.get("tokens") and r["step"]), None)
    config = file.with_name("config.yaml")
    tree = read_yaml(config)[0] if config.is_file() else {}
    directory = file.resolve().parent
    return Run(directory.name, directory, records, tree, tokens)


def _distinct_names(runs: list[Run]) -> list[Run]:
    """Return the runs, with their whole paths below the common directory as names if two names are equal."""
    if len({run.name for run in runs}) == len({run.directory for run in runs}):
        return runs
    root = os.path.commonpath([run.directory.parent for run in runs])
    return [run._replace(name=str(run.directory.relative_to(root))) for run in runs]


def smoothed(points: np.ndarray) -> np.ndarray:
    """Return the running mean of points [n, 2] over 1/50 of them, for the points whose window is complete."""
    window = max(1, len(points) // 100) * 2 + 1
    sums = np.concatenate([np.zeros((1, 2)), np.cumsum(points, 0)])
    return (sums[window:] - sums[:-window]) / window


def _readable(points: np.ndarray) -> np.ndarray:
    """Return the points, smoothed if they are many."""
    return smoothed(points) if len(points) >= SMOOTH_FROM else points


# ---- the legend ----


def summary(run: Run, earlier: Sequence[Run] = ()) -> str:
    """Return the run's entry in the legend: its name, final loss, median speed and MFU, final HellaSwag score, and the
    run among the `earlier` ones whose losses are the same.
    """
    val, train, speed, mfu, hellaswag = (
        run.points(key)[:, 1] for key in ("val_loss", "loss", "tok_s", "mfu", "hellaswag")
    )
    loss = f"val {val[-1]:.4f}" if len(val) else f"train {_readable(run.points('loss'))[-1, 1]:.4f}"
    lines = [*_name_lines(run.name), loss]
    if len(speed):
        lines.append(f"{_short(np.median(speed))} tokens/s" + (f", MFU {np.median(mfu):.0%}" if len(mfu) else ""))
    if len(hellaswag):
        lines.append(f"HellaSwag {100 * hellaswag[-1]:.1f}")
    if same := [other.name for other in earlier if _equal_losses(run, other)]:
        lines += ["losses equal to", *_name_lines(same[0])]
    return "\n".join(lines)


def _name_lines(name: str) -> list[str]:
    """Return a name as lines of the legend, in which matplotlib finds no formula and no name to leave out."""
    lines = re.findall(rf".{{1,{NAME_CHARS}}}$|.{{1,{NAME_CHARS - 1}}}[-_. /]|.{{1,{NAME_CHARS}}}", printable(name))
    return [(f" {line}" if line.startswith("_") else line).replace("$", r"\$") for line in lines]


def _equal_losses(run: Run, other: Run) -> bool:
    return all(np.array_equal(run.points(key), other.points(key)) for key in ("loss", "val_loss"))


def _add_legend(
    figure: Any, runs: Sequence[Run], levels: Sequence[str], hellaswag: bool, references: Sequence[Reference]
) -> None:
    """Add one legend for all panels at the right: the runs, the references, the sizes of OpenAI's GPT-2."""
    from matplotlib.lines import Line2D

    entries = [Line2D([], [], label=summary(run, runs[:i]), **_style(i)) for i, run in enumerate(runs)]
    for size in levels:
        loss, score = OPENAI[size]
        label = f"OpenAI GPT-2 {size}\nloss {loss:.3f}" + (f", HellaSwag {100 * score:.2f}" if hellaswag else "")
        entries.append(Line2D([], [], label=label, **_level_style(size)))
    for i, reference in enumerate(references):
        end, loss = reference.points[-1]
        texts = (reference.name, reference.title, reference.note)
        lines = [*(line for text in texts for line in _name_lines(text)), f"val {loss:.4f} after {_short(end)}"]
        entries.append(Line2D([], [], label="\n".join(lines), **_reference_style(i)))
    legend = figure.legend(
        handles=entries, loc="outside right upper", frameon=False, fontsize=8.5, labelcolor="linecolor"
    )
    needed = legend.get_window_extent().height / figure.dpi + 0.3
    figure.set_figheight(max(figure.get_figheight(), needed))


# ---- the panels ----


def _draw_loss(
    axes: Any,
    runs: Sequence[Run],
    scales: Sequence[float],
    openai: bool,
    automatic: bool,
    references: Sequence[Reference] = (),
) -> list[str]:
    """Draw training loss as a line and validation loss as dots; return the sizes of GPT-2 that are drawn as levels."""
    lows, highs = [], []
    curves = [run.points("loss", scale) for run, scale in zip(runs, scales, strict=True)]
    dots = [run.points("val_loss", scale) for run, scale in zip(runs, scales, strict=True)]
    for i, val in enumerate(dots):
        line = _draw_curve(axes, curves, i)
        place, count = _place_among_equals(dots, i)
        size = 5 + 3 * (count - 1 - place)  # equal dots become rings
        axes.plot(*val.T, color=_style(i)["color"], lw=0, marker="o", ms=size, mec="white", mew=0.7, zorder=4)
        lows.append(min(curve[:, 1].min() for curve in (line, val) if len(curve)))
        highs.append(_top(line if len(line) else val))
    last = max(curve[-1, 0] for curve in (*curves, *dots) if len(curve))
    for i, reference in enumerate(references):
        shown = reference.points[reference.points[:, 0] <= last]
        axes.plot(*shown.T, zorder=2, **_reference_style(i))
        lows.append(shown[:, 1].min())
    low, high = min(lows), max(highs)
    levels = {size: loss for size, (loss, _) in OPENAI.items() if openai or automatic and low - 0.25 < loss < high}
    _draw_levels(axes, levels)
    low, high = min([low, *levels.values()]), max([high, *levels.values()])
    margin = 0.05 * (high - low) or 0.1  # a run of one step is a point
    axes.set_ylim(low - margin, high + margin)
    axes.set_title("loss, nats per token: training as a line, validation as dots", loc="left", fontsize=10)
    return list(levels)


def _draw_lines(axes: Any, runs: Sequence[Run], scales: Sequence[float], key: str, title: str) -> None:
    highs = []
    curves = [run.points(key, scale) for run, scale in zip(runs, scales, strict=True)]
    for i, points in enumerate(curves):
        if not len(points):
            continue
        width = 1.3 + 1.5 * (len(runs) - 1 - i) / len(runs) if key == "lr" else 1.3  # parts may be equal
        _draw_curve(axes, curves, i, width, smooth=key != "lr")
        # one spike, or the first step, which compiles, must not flatten the rest
        highs.append(min(points[:, 1].max(), 2 * np.quantile(points[:, 1], 0.98)))
    if highs:
        axes.set_ylim(0, 1.08 * max(highs) or 1.0)
    axes.set_title(title, loc="left", fontsize=10)


def _draw_hellaswag(axes: Any, runs: Sequence[Run], scales: Sequence[float], openai: bool) -> list[str]:
    """Draw the scores in percent; return the sizes of GPT-2 that are drawn as levels."""
    curves = [run.points("hellaswag", scale) * [1, 100] for run, scale in zip(runs, scales, strict=True)]
    _draw_scores(axes, curves)
    best = max(25.0, *(points[-1, 1] for points in curves if len(points)))  # 25: four endings to choose from
    levels = {size: 100 * score for size, (_, score) in OPENAI.items() if openai and 100 * score < best + 5}
    _draw_levels(axes, levels)
    axes.set_title("HellaSwag, %", loc="left", fontsize=10)
    return list(levels)


def _draw_scores(axes: Any, curves: Sequence[np.ndarray]) -> None:
    for i, points in enumerate(curves):
        if len(points):
            _draw_curve(axes, curves, i)


def _draw_curve(axes: Any, curves: Sequence[np.ndarray], i: int, width: float = 1.3, smooth: bool = True) -> np.ndarray:
    """Draw curves[i], points [n, 2], and return those of the opaque line; many are drawn faintly behind their mean.

    Of n equal curves the first is a line, over which each other one has every n-th dash.
    """
    points, style = curves[i], _style(i)
    place, count = _place_among_equals(curves, i)
    if place:
        width = 1.3
        style["linestyle"] = (DASH * place, (DASH, DASH * (count - 1)))
    line = _readable(points) if smooth else points
    if line is not points:
        axes.plot(*points.T, color=_style(i)["color"], alpha=0.22, lw=0.7, zorder=1)
    marker = "o" if len(line) == 1 else None  # a line needs two points
    axes.plot(*line.T, lw=width, marker=marker, ms=4 + 3 * (count - 1 - place), zorder=3, **style)
    return line


def _place_among_equals(curves: Sequence[np.ndarray], i: int) -> tuple[int, int]:
    """Return the place of curve i among the curves equal to it, from 0, and their number."""
    equal = [j for j, curve in enumerate(curves) if np.array_equal(curve, curves[i])]
    return equal.index(i), len(equal)


def _draw_levels(axes: Any, levels: dict[str, float]) -> None:
    for size, level in levels.items():
        axes.axhline(level, zorder=2, **_level_style(size))


def _finish(axes: Any, unit: str, ticks: int) -> None:
    axes.set_xlabel(unit, fontsize=9)
    axes.locator_params(axis="x", nbins=ticks)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    if axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _top(line: np.ndarray) -> float:
    """Return the highest loss to show.  The first 1/20 of a long run is left out: its fall from ln(vocabulary) would
    flatten the rest.
    """
    return float(line[len(line) // 20 if len(line) >= SMOOTH_FROM // 2 else 0 :, 1].max())


def _style(i: int) -> dict[str, Any]:
    """Return colour and dashes of run i."""
    return dict(color=COLORS[i % len(COLORS)], linestyle=("-", "--", ":")[i // len(COLORS) % 3])


def _level_style(size: str) -> dict[str, Any]:
    return dict(color="0.45", lw=1.1, linestyle=(0, LEVEL_DASHES[size]))


def _reference_style(i: int) -> dict[str, Any]:
    return dict(color="0.2", lw=1.0, marker="sDv^"[i % 4], ms=3)


def _short(value: float) -> str:
    """Return the value with a unit: 624k, 1.5M or 10B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def plot(
    *runs: Path,
    out: Annotated[Path, Parameter(name=("out", "-o"))] = Path("loss.png"),
    openai: bool = False,
    beside: str = "",
) -> None:
    """Draw loss, learning rate, gradient norm, speed and task scores of runs over tokens, as one picture.

    Parameters
    ----------
    runs: Path
        Run directories.
    out: Path
        Picture to write; its ending, .png, .svg or .pdf, is its format.
    openai: bool
        Draw OpenAI's GPT-2 as horizontal lines, even if the validation data is not FineWeb.
    beside: str
        Published curves of validation loss to draw too, separated by commas: gpt2_124m_llmc, modded_nanogpt_adamw,
        modded_nanogpt_muon.
    """
    if not runs:
        raise ConfigError("plot: expected one or more run directories")
    for line in draw_runs(runs, out, openai, beside.replace(",", " ").split()):
        print(printable(line))
    print(printable(f"wrote {out}"))
