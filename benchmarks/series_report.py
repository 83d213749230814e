"""Report and picture of a series: the statistics of its arms, and of the pairs of runs of one seed."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.series_file import Series
from benchmarks.series_results import Result, same_data
from gpt2_triton.errors import ConfigError

COLORS = ("#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#000000")


def student_t(freedom: int, probability: float = 0.975) -> float:
    """Return the quantile of Student's t, by Simpson's rule over its density and bisection."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2

    def density(x: float) -> float:
        return math.exp(log_scale - (freedom + 1) / 2 * math.log1p(x * x / freedom))

    def below(x: float, n: int = 2000) -> float:
        h = x / n
        inner = sum((4 if i % 2 else 2) * density(i * h) for i in range(1, n))
        return 0.5 + h / 3 * (density(0) + inner + density(x))

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return low


class Difference(NamedTuple):
    """The mean of the pairs' differences, and half of its 95% interval, infinite for fewer than two pairs."""

    pairs: int
    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f}" + (f" +- {self.half:.4f}" if math.isfinite(self.half) else "")


def pairs(rows: Sequence[Result], arm: str, baseline: str, key: str) -> list[tuple[Result, Result]]:
    """Return the results of both arms that have a `key`, by seed, on the same data."""
    ours, others = (
        {row["seed"]: row for row in rows if row["arm"] == name and row.get(key) is not None}
        for name in (arm, baseline)
    )
    shared = [(ours[seed], others[seed]) for seed in sorted(ours) if seed in others]
    return [pair for pair in shared if same_data(*pair)]


def unlike_pairs(rows: Sequence[Result], arm: str, baseline: str) -> list[str]:
    """Return a line for each record of a run in which the halves of some pairs differ."""
    lines, both = [], pairs(rows, arm, baseline, "train_loss")
    for key, words in (("commit", "of two commits"), ("device", "from two kinds of GPU")):
        if unlike := sum(key in a and key in b and a[key] != b[key] for a, b in both):
            lines.append(f"{arm}: {unlike} of {len(both)} pairs with {baseline} are {words}")
    return lines


def difference(rows: Sequence[Result], arm: str, baseline: str, key: str) -> Difference | None:
    """Return what `arm` has more of `key` than `baseline`, over the seeds of both on the same data; None without a
    pair.
    """
    found = [mine[key] - other[key] for mine, other in pairs(rows, arm, baseline, key)]
    if not found:
        return None
    n, half = len(found), math.inf
    if n > 1:
        half = student_t(n - 1) * statistics.stdev(found) / math.sqrt(n)
    return Difference(n, statistics.fmean(found), half)


def arms_of(series: Series, rows: Sequence[Result]) -> list[str]:
    """Return the arms that have results: those of the series, then those of an earlier version of its file."""
    found = [row["arm"] for row in rows]
    return [arm for arm in dict.fromkeys([run.arm for run in series.runs] + found) if arm in found]


def report(series: Series, rows: Sequence[Result]) -> str:
    """Return the table of a series: a line for each arm that has a result, with the difference of its pairs; below it
    what their halves do not share.
    """
    head = (
        "arm",
        "runs",
        "training loss",
        "sd",
        "validation",
        "sd",
        "ms",
        "tok/s",
        "difference in training",
        "in validation",
    )
    lines, notes = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)], []
    for arm in arms_of(series, rows):
        mine = [row for row in rows if row["arm"] == arm]
        cells = [arm, str(len(mine))]
        for key in ("train_loss", "val_loss"):
            values = [row[key] for row in mine if row[key] is not None]
            cells.append(f"{statistics.fmean(values):.4f}" if values else "")
            cells.append(f"{statistics.stdev(values):.4f}" if len(values) > 1 else "")
        ms = statistics.median(row["ms"] for row in mine)
        tokens = mine[0]["tokens"] / mine[0]["steps"]
        cells += [f"{ms:.2f}", f"{1e3 * tokens / ms:,.0f}"]
        other = series.compared_with(arm)
        against = "" if other == series.baseline else f" against {other}"
        for key in ("train_loss", "val_loss"):
            found = difference(rows, arm, other, key) if other else None
            cells.append(f"{found} ({found.pairs}){against}" if found else "")
        lines.append("| " + " | ".join(cells) + " |")
        notes += unlike_pairs(rows, arm, other) if other else []
    return "\n".join([*lines, *notes])


def plot(series: Series, rows: Sequence[Result], out: Path) -> None:
    """Draw the training loss of each arm, the mean of its runs, over minutes of its own step time.  The legend has its
    tokens and the mean of the validation losses at the end.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for arm, color in zip(arms_of(series, rows), COLORS * 9):
        mine = [row for row in rows if row["arm"] == arm]
        points = min(len(row["curve"]) for row in mine)
        means = [statistics.fmean(row["curve"][i] for row in mine) for i in range(points)]
        step = mine[0]["stride"] * statistics.median(row["ms"] for row in mine) / 60e3
        label = f"{arm}: {mine[0]['tokens'] / 1e6:.0f}M tokens"
        if ends := [row["val_loss"] for row in mine if row["val_loss"] is not None]:
            label += f", validation loss {statistics.fmean(ends):.3f}"
        axes.plot([(i + 0.5) * step for i in range(points)], means, color=color, lw=1.4, label=label)
    axes.set(xlabel="minutes of training on one GPU", ylabel="training loss")
    low = min(min(row["curve"]) for row in rows)
    axes.set_ylim(low - 0.05, low + 2.5)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {out}: {error.strerror}; choose another") from None
