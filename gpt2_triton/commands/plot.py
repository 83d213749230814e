"""Curves of runs, overlaid, from their metrics.jsonl, as a PNG: loss, learning rate, gradient norm, speed, HellaSwag.

The colours are Okabe and Ito's, which the colour-blind can tell apart; each curve carries its name at its end.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import yaml
from cyclopts import Parameter

from gpt2_triton.errors import ConfigError
from gpt2_triton.training.metrics import METRICS, read_metrics

SMOOTH_FROM = 200  # points; a shorter curve is readable as it is
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "0.45"

# OpenAI's checkpoints: loss on FineWeb's validation shard of llm.c, HellaSwag (acc_norm), as llm.c's vislog has them
OPENAI = {"124M": (3.4250, 0.2945), "350M": (3.0831, 0.3752), "774M": (3.0006, 0.4320), "1558M": (2.8313, 0.4889)}


End = tuple[float, str, int]  # of a curve: its height, its name, the number of its run


class Run(NamedTuple):
    name: str
    records: list[dict[str, Any]]
    config: dict[str, Any]  # config.yaml as it is; empty if there is none
    tokens_per_step: float | None

    def points(self, key: str, x_scale: float) -> np.ndarray:
        """(x_scale * step, value) [n, 2]; steps whose value was not finite have none."""
        found = [(r["step"] * x_scale, r[key]) for r in self.records if r.get(key) is not None]
        return np.array(found, np.float64).reshape(-1, 2)

    def on_fineweb(self) -> bool:
        data = self.config.get("data", {})
        return data.get("tokenizer") == "gpt2" and "fineweb" in str(data.get("val")).lower()


def draw_runs(paths: Sequence[Path], out: Path, openai: bool = False) -> None:
    """Draw all runs over tokens (over steps when a run's tokens are unknown).

    `openai` adds OpenAI's GPT-2 as horizontal lines; they come by themselves when every run's validation data is
    FineWeb in GPT-2's tokens, as far as the curves reach them.
    """
    if out.suffix != ".png":
        raise ConfigError(f"plot: {out} does not end in .png; choose another -o")
    runs = [read_run(path) for path in paths]
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("plot: matplotlib is not installed; pip install 'gpt2_triton[plot]'") from None
    by_tokens = all(run.tokens_per_step for run in runs)
    scales = [run.tokens_per_step or 1.0 if by_tokens else 1.0 for run in runs]
    hellaswag = any("hellaswag" in record for run in runs for record in run.records)
    panels = ["lr", "norm", "speed"] + ["hellaswag"] * hellaswag
    figure = Figure(figsize=(10, 7), layout="constrained")
    (above,), (below,) = figure.subfigures(2, 1, height_ratios=[2, 1], squeeze=False)  # each with margins of its own
    axes = dict(zip(["loss", *panels], [above.subplots(), *below.subplots(1, len(panels))], strict=True))
    automatic = not openai and all(run.on_fineweb() for run in runs)
    ends = {
        "loss": _draw_loss(axes["loss"], runs, scales, openai, automatic),
        "lr": _draw_lines(axes["lr"], runs, scales, "lr", "learning rate"),
        "norm": _draw_lines(axes["norm"], runs, scales, "norm", "gradient norm"),
        "speed": _draw_lines(axes["speed"], runs, scales, "tok_s", "tokens per second"),
    }
    if hellaswag:
        ends["hellaswag"] = _draw_hellaswag(axes["hellaswag"], runs, scales, openai or automatic)
    last = max(panel.dataLim.x1 for panel in axes.values())
    for name, panel in axes.items():
        panel.set_xlim(-0.01 * last, 1.01 * last)  # the same in all; dots at its ends are whole
        _finish(panel, "tokens" if by_tokens else "steps", ticks=10 if name == "loss" else 4)
    figure.draw_without_rendering()  # places the panels, so that the names' distances can be told
    for name, panel in axes.items():
        _label_ends(panel, ends[name])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot: cannot write {out}: {error.strerror}; choose another -o") from error


def read_run(path: Path) -> Run:
    """A run directory's name, records and configuration; `path` may be its metrics.jsonl itself."""
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: no {METRICS} there; expected a run directory, which train.py makes")
    records = read_metrics(file)
    if not any(r.get(key) is not None for r in records for key in ("loss", "val_loss")):
        raise ConfigError(f"{file}: holds no losses yet; plot it after a step")
    tokens = next((r["tokens"] / r["step"] for r in records if r.get("tokens")), None)
    config = file.with_name("config.yaml")
    tree = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return Run(file.resolve().parent.name, records, tree if isinstance(tree, dict) else {}, tokens)


def smoothed(points: np.ndarray) -> np.ndarray:
    """Means over 1/50 of the points [n, 2], each at the middle of its window; only whole windows have one."""
    window = max(1, len(points) // 100) * 2 + 1
    sums = np.concatenate([np.zeros((1, 2)), np.cumsum(points, 0)])
    return (sums[window:] - sums[:-window]) / window


# ---- the panels ----


def _draw_loss(axes: Any, runs: Sequence[Run], scales: Sequence[float], openai: bool, automatic: bool) -> list[End]:
    """Training loss as a line (faint, and smoothed when long), validation loss as dots."""
    ends, lows, highs = [], [], []
    for i, (run, scale) in enumerate(zip(runs, scales, strict=True)):
        train, val = run.points("loss", scale), run.points("val_loss", scale)
        line = _draw_curve(axes, train, i)
        axes.plot(*val.T, color=_color(i), lw=0, marker="o", ms=5, mec="white", mew=0.7, zorder=4)
        y, what = (val[-1, 1], "val") if len(val) else (line[-1, 1], "train")
        ends.append((y, f"{run.name}\n{what} {y:.4f}", i))
        lows.append(min(curve[:, 1].min() for curve in (line, val) if len(curve)))
        highs.append(_top(line if len(line) else val))
    low, high = min(lows), max(highs)
    lines = {size: loss for size, (loss, _) in OPENAI.items()}
    if automatic:  # those passed, and the next one if it is near
        lines = {size: loss for size, loss in lines.items() if low - 0.25 < loss < high}
    if openai or automatic:
        _draw_levels(axes, {f"OpenAI GPT-2 {size}: {loss:.3f}": loss for size, loss in lines.items()})
        low, high = min([low, *lines.values()]), max([high, *lines.values()])
    margin = 0.05 * (high - low) or 0.1  # a run of one step is a point
    axes.set_ylim(low - margin, high + margin)
    axes.set_title("loss, nats per token: training as a line, validation as dots", loc="left", fontsize=10)
    return ends


def _draw_lines(axes: Any, runs: Sequence[Run], scales: Sequence[float], key: str, title: str) -> list[End]:
    highs, ends = [], []
    for i, (run, scale) in enumerate(zip(runs, scales, strict=True)):
        points = run.points(key, scale)
        if not len(points):
            continue
        width = 1.3 + 1.5 * (len(runs) - 1 - i) / len(runs) if key == "lr" else 1.3  # equal schedules stay visible
        _draw_curve(axes, points, i, width, smooth=key != "lr")
        # one spike, or the first step, which compiles, must not flatten the rest
        highs.append(min(points[:, 1].max(), 2 * np.quantile(points[:, 1], 0.98)))
        if key == "tok_s":
            speed, mfu = np.median(points[:, 1]), run.points("mfu", scale)[:, 1]
            ends.append((speed, _short(speed) + (f", MFU {np.median(mfu):.0%}" if len(mfu) else ""), i))
    if highs:
        axes.set_ylim(0, 1.08 * max(highs))
    axes.set_title(title, loc="left", fontsize=10)
    return ends


def _draw_hellaswag(axes: Any, runs: Sequence[Run], scales: Sequence[float], openai: bool) -> list[End]:
    ends = []
    for i, (run, scale) in enumerate(zip(runs, scales, strict=True)):
        points = run.points("hellaswag", scale) * [1, 100]
        if len(points):
            _draw_curve(axes, points, i)
            ends.append((points[-1, 1], f"{points[-1, 1]:.1f}", i))
    if openai:
        near = {
            size: 100 * score for size, (_, score) in OPENAI.items() if 100 * score < max(ends, default=(25.0,))[0] + 5
        }
        _draw_levels(axes, {f"GPT-2 {size}: {score:.2f}": score for size, score in near.items()})
    axes.set_title("HellaSwag, %", loc="left", fontsize=10)
    return ends


def _draw_curve(axes: Any, points: np.ndarray, i: int, width: float = 1.3, smooth: bool = True) -> np.ndarray:
    """Draw and return the line that is read off, [n, 2]: of many points their running mean, before them all."""
    if smooth and len(points) >= SMOOTH_FROM:
        axes.plot(*points.T, color=_color(i), alpha=0.22, lw=0.7, zorder=1)
        points = smoothed(points)
    marker = "o" if len(points) == 1 else None  # of one point there is no line
    axes.plot(*points.T, color=_color(i), lw=width, linestyle=_dash(i), marker=marker, ms=4, zorder=3)
    return points


def _draw_levels(axes: Any, levels: dict[str, float]) -> None:
    """Horizontal lines, named from the left on, one beside the other, so that lines near each other stay readable."""
    for i, (label, level) in enumerate(levels.items()):
        axes.axhline(level, color=GREY, lw=0.9, linestyle=(0, (5, 4)), zorder=2)
        axes.annotate(
            label, (0.25 * i, level), xycoords=("axes fraction", "data"), xytext=(4, 2.5), textcoords="offset points",
            color="0.3", fontsize=7.5, zorder=5, bbox=dict(facecolor="white", edgecolor="none", alpha=0.75, pad=0.6),
        )  # fmt: skip


def _label_ends(axes: Any, ends: Sequence[End]) -> None:
    """Names of curves in the right margin, each at the height of its curve's end or as near as the others allow."""
    per_pixel = 72 / axes.figure.dpi
    ends = sorted(ends, key=lambda end: end[0])
    wanted = [axes.transData.transform((0, y))[1] * per_pixel for y, _, _ in ends]
    places = _apart(wanted, 11.5 * max((label.count("\n") + 1 for _, label, _ in ends), default=1))
    for (y, label, i), at, place in zip(ends, wanted, places, strict=True):
        axes.annotate(
            label, (1, y), xycoords=("axes fraction", "data"), xytext=(6, place - at), textcoords="offset points",
            color=_color(i), fontsize=8.5, va="center", linespacing=1.1, annotation_clip=False,
        )  # fmt: skip


def _apart(wanted: Sequence[float], distance: float) -> list[float]:
    """Rising positions moved as little as makes them `distance` apart; neighbours share a move."""
    groups: list[list[float]] = []  # of positions that touch, each as if the ones before it took no room
    for i, at in enumerate(wanted):
        groups.append([at - i * distance])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    means = [float(np.mean(group)) for group in groups for _ in group]
    return [mean + i * distance for i, mean in enumerate(means)]


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
    """The highest loss to show: of a long run not the first 1/20, whose fall from ln(vocabulary) would flatten the
    rest.
    """
    return float(line[len(line) // 20 if len(line) >= SMOOTH_FROM // 2 else 0 :, 1].max())


def _color(i: int) -> str:
    return COLORS[i % len(COLORS)]


def _dash(i: int) -> str:
    return ("-", "--", ":")[i // len(COLORS) % 3]


def _short(value: float) -> str:
    """624k, 1.5M or 10B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def plot(
    *runs: Path, out: Annotated[Path, Parameter(name=("out", "-o"))] = Path("loss.png"), openai: bool = False
) -> None:
    """Draw loss, learning rate, gradient norm, speed and HellaSwag of runs over tokens, into one PNG.

    Parameters
    ----------
    runs: Path
        Run directories.
    out: Path
        The picture.
    openai: bool
        Draw OpenAI's GPT-2 as lines, also where the validation data is not FineWeb.
    """
    if not runs:
        raise ConfigError("plot: expected one or more run directories")
    draw_runs(runs, out, openai)
    print(f"wrote {out}")
