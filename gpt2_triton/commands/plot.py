"""`plot`: loss, learning rate, gradient norm, speed and HellaSwag of runs, from their
metrics.jsonl, as one picture.

Okabe and Ito's colours remain distinct to colour-blind readers.
"""

import io
import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from cyclopts import Parameter

from gpt2_triton.console import format_count, print_line
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import write_atomic
from gpt2_triton.training.metrics import METRICS, read_metrics

FORMATS = (".png", ".svg", ".pdf")
SMOOTH_FROM = 200  # points; a shorter curve is readable without smoothing
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PANELS = dict(
    lr="learning rate",
    norm="gradient norm",
    tok_s="tokens per second",
    hellaswag="HellaSwag accuracy",
)
LOSS_TITLE = "loss, nats per token: training as a line, validation as dots"
# for --beside
CURVES = {path.stem: path for path in sorted(Path(__file__).with_name("curves").glob("*.json"))}

# OpenAI's checkpoints by llm.c's vislog: loss on llm.c's validation shard of
# FineWeb, HellaSwag (acc_norm)
OPENAI = {
    "124M": (3.4250, 0.2945),
    "350M": (3.0831, 0.3752),
    "774M": (3.0006, 0.4320),
    "1558M": (2.8313, 0.4889),
}


class Curves(NamedTuple):
    """A run's name and records, as metrics.jsonl has them."""

    name: str
    records: list[dict[str, Any]]
    tokens_per_step: float

    def points(self, key: str) -> np.ndarray:
        """Return (tokens, value) [n, 2] of the steps that have a value."""
        found = [
            (r["step"] * self.tokens_per_step, r[key])
            for r in self.records
            if r.get(key) is not None
        ]
        return np.array(found, np.float64).reshape(-1, 2)

    def summary(self) -> str:
        """Return the entry in the legend: name, last loss, median speed and
        MFU, last HellaSwag score.
        """
        keys = ("val_loss", "loss", "tok_s", "mfu", "hellaswag")
        val, train, speed, mfu, hellaswag = (self.points(key)[:, 1] for key in keys)
        loss = f"val {val[-1]:.4f}" if len(val) else f"train {train[-50:].mean():.4f}"
        lines = [textwrap.fill(self.name, 28), loss]
        if len(speed):
            share = f", MFU {np.median(mfu):.0%}" if len(mfu) else ""
            lines.append(f"{format_count(np.median(speed))} tokens/s{share}")
        if len(hellaswag):
            lines.append(f"HellaSwag {100 * hellaswag[-1]:.1f}")
        return "\n".join(lines)


def read_run(path: Path) -> Curves:
    """Read a run directory, or its metrics.jsonl alone; ConfigError if
    it has no step with a loss.
    """
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: no {METRICS} there; expected a run directory")
    records = read_metrics(file)
    tokens = [r["tokens"] / r["step"] for r in records if r.get("loss") is not None]
    if not tokens:
        raise ConfigError(f"{file}: holds no step with a loss yet; plot it after one")
    return Curves(file.resolve().parent.name, records, tokens[0])


def read_curve(name: str) -> dict[str, Any]:
    """Return a curve of CURVES with its points (tokens, validation loss) [n, 2];
    ConfigError for another name.
    """
    if name not in CURVES:
        raise ConfigError(f"--beside: unknown curve {name}; known are {', '.join(CURVES)}")
    curve = json.loads(CURVES[name].read_text())
    return curve | {
        "name": name,
        "points": np.array(curve["val_loss"], np.float64) * [curve["tokens_per_step"], 1],
    }


def draw_runs(
    paths: Sequence[Path], out: Path, openai: bool = False, beside: Sequence[str] = ()
) -> list[str]:
    """Draw runs over tokens, beside OpenAI's GPT-2 and curves of CURVES; return lines
    that compare their losses.  ConfigError for another ending of `out`, or a run without losses.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(f"-o: {out} does not end in {', '.join(FORMATS)}; choose one of them")
    curves = [read_curve(name) for name in beside]
    runs = [read_run(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        runs = [run._replace(name=str(path)) for run, path in zip(runs, paths)]
    figure, axes = _new_figure(runs, len(curves))
    tops = [_draw_run(axes, run, i) for i, run in enumerate(runs)]
    last = axes["loss"].dataLim.x1
    for curve, marker in zip(curves, "sDv"):
        _draw_curve(axes["loss"], curve, marker, last)
    if openai:
        _draw_openai(axes)
    _set_heights(axes, max(tops))
    _cut_spikes(axes["norm"], runs)
    for key, panel in axes.items():
        _finish(panel, PANELS.get(key, LOSS_TITLE))
    handles = axes["loss"].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", frameon=False, fontsize=8.5)
    _save(figure, out)
    return [compare(run, curve) for curve in curves for run in runs]


def _new_figure(runs: Sequence[Curves], curves: int) -> tuple[Any, dict[str, Any]]:
    """Return a figure and its empty panels by key; HellaSwag has one if a run has a score."""
    # a notebook's shell names a backend that matplotlib may not have
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure

    scored = any(len(run.points("hellaswag")) for run in runs)
    panels = [key for key in PANELS if key != "hellaswag" or scored]
    height = max(7, 0.6 * (len(runs) + curves))  # of the legend's entries
    figure = Figure(figsize=(11, height), layout="constrained")
    layout: list[Any] = [["loss"] * len(panels), panels]
    return figure, figure.subplot_mosaic(layout, height_ratios=[2, 1])


def _draw_run(axes: dict[str, Any], run: Curves, number: int) -> float:
    """Draw a run into each panel; return the highest loss to show."""
    line = ("-", "--", ":")[number // len(COLORS) % 3]
    style = dict(color=COLORS[number % len(COLORS)], linestyle=line)
    for key in axes.keys() - {"loss"}:
        _draw_line(axes[key], run.points(key), style, smooth=key != "lr")
    return _draw_loss(axes["loss"], run, style)


def _set_heights(axes: dict[str, Any], top: float) -> None:
    """Show losses up to top, HellaSwag as it is, and all else from 0."""
    low = axes["loss"].dataLim.y0
    margin = 0.04 * (top - low) or 0.1
    axes["loss"].set_ylim(low - margin, top + margin)
    for key in axes.keys() - {"loss", "hellaswag"}:
        axes[key].set_ylim(bottom=0)


def _cut_spikes(axes: Any, runs: Sequence[Curves]) -> None:
    """Limit the panel of norms: one spike must not flatten the rest."""
    norms = np.concatenate([run.points("norm")[:, 1] for run in runs])
    if len(norms):
        axes.set_ylim(top=2 * np.quantile(norms, 0.98) or 1.0)


def _save(figure: Any, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, format=out.suffix[1:], dpi=150)
    write_atomic(out, picture.getbuffer())


def _draw_loss(axes: Any, run: Curves, style: dict[str, Any]) -> float:
    """Draw training and validation loss; return the highest, without a long run's first fall."""
    loss = run.points("loss")
    val = run.points("val_loss")
    _draw_line(axes, loss, style)
    axes.plot(*val.T, color=style["color"], lw=0, marker="o", ms=5, mec="white", mew=0.7, zorder=4)
    axes.plot([], [], label=run.summary(), **style)
    if len(loss) < SMOOTH_FROM:
        return float(np.concatenate([loss, val])[:, 1].max())
    line = smoothed(loss)[:, 1]
    return float(line[len(line) // 20 :].max())  # the first fall would flatten the rest


def _draw_curve(axes: Any, curve: dict[str, Any], marker: str, last: float) -> None:
    """Draw a published curve up to `last` tokens, one point as a label."""
    tokens = curve["points"][:, 0]
    shown = curve["points"][tokens <= last]
    label = textwrap.fill(f"{curve['title']} ({curve['note']})", 28)
    if len(shown) < 2:
        label += f"\nits next loss is at {format_count(tokens[len(shown)])} tokens"
        shown = shown[:0]
    axes.plot(*shown.T, color="0.2", lw=1.0, marker=marker, ms=3, label=f"{curve['name']}\n{label}")


def _draw_line(axes: Any, points: np.ndarray, style: dict[str, Any], smooth: bool = True) -> None:
    """Draw points [n, 2]; behind a smoothed line they are faint."""
    if smooth and len(points) >= SMOOTH_FROM:
        axes.plot(*points.T, color=style["color"], alpha=0.22, lw=0.7)
        points = smoothed(points)
    # a line needs two points
    axes.plot(*points.T, lw=1.3, marker="o" if len(points) == 1 else None, ms=4, **style)


def smoothed(points: np.ndarray) -> np.ndarray:
    """Return the running mean of points [n, 2] over complete windows of n/50; few points
    are returned as they are.
    """
    window = max(1, len(points) // 100) * 2 + 1 if len(points) >= SMOOTH_FROM else 1
    sums = np.concatenate([np.zeros((1, 2)), np.cumsum(points, 0)])
    return (sums[window:] - sums[:-window]) / window


def _draw_openai(axes: dict[str, Any]) -> None:
    """Draw each size of OpenAI's GPT-2 as a horizontal line."""
    for (size, (loss, score)), dashes in zip(OPENAI.items(), ("-", "--", "-.", ":")):
        label = f"OpenAI GPT-2 {size}\nloss {loss:.3f}, HellaSwag {100 * score:.2f}"
        axes["loss"].axhline(loss, color="0.45", lw=1.1, linestyle=dashes, label=label)
        if "hellaswag" in axes:
            axes["hellaswag"].axhline(score, color="0.45", lw=1.1, linestyle=dashes)


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.locator_params(axis="x", nbins=4 if title in PANELS.values() else 10)
    if title == PANELS["lr"]:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    if axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def compare(run: Curves, curve: dict[str, Any]) -> str:
    """Return a line: the run's last validation loss, and the curve's loss
    interpolated to as many tokens.
    """
    val = run.points("val_loss")
    if not len(val):
        return f"{run.name}: no validation loss to compare with {curve['name']}"
    tokens, loss = val[-1]
    end, last = curve["points"][-1]
    there = f"has {np.interp(tokens, *curve['points'].T):.4f} there"
    if tokens > end:
        there = f"ended at {last:.4f} after {format_count(end)}"
    here = f"{run.name}: val loss {loss:.4f} at {format_count(tokens)} tokens"
    return f"{here}; {curve['name']} {there} ({curve['note']})"


def plot(
    *runs: Annotated[Path, Parameter(required=True)],
    out: Annotated[Path, Parameter(name=("out", "-o"))] = Path("loss.png"),
    openai: bool = False,
    beside: str = "",
) -> None:
    """Draw loss, learning rate, gradient norm, speed and HellaSwag of runs
    over tokens, as one picture.

    Args:
        runs: Run directories.
        out: Picture to write; its ending, .png, .svg or .pdf, is its format.
        openai: Draw OpenAI's GPT-2 as horizontal lines: its losses on FineWeb,
            comparable for the tokenizer gpt2.
        beside: Published curves, with commas between: gpt2_124m_llmc,
            modded_nanogpt_adamw, modded_nanogpt_muon.
    """
    if openai or beside:
        for run in runs:
            config = run / "config.yaml"
            is_gpt2 = not config.is_file() or "tokenizer: gpt2\n" in config.read_text()
            if not is_gpt2:
                print_line(
                    f"note: {run}: its tokens are not GPT-2's; "
                    "do not compare its losses with theirs"
                )
    for line in draw_runs(runs, out, openai, beside.replace(",", " ").split()):
        print_line(line)
    print_line(f"wrote {out}")
