"""Loss curves of runs, from their metrics.jsonl, as a PNG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.config import ConfigError
from gpt2_triton.metrics import METRICS, read_metrics

SMOOTH_FROM = 200  # points; a shorter curve is readable as it is


def plot(runs: Sequence[Path], out: Path) -> None:
    """Draw training loss (faint, and smoothed when long) and validation loss of every run over steps."""
    curves = [_curves(run) for run in runs]
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("plot: matplotlib is not installed; pip install 'gpt2_triton[plot]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (run, (train, val)) in enumerate(zip(runs, curves, strict=True)):
        name, color = run.resolve().name, f"C{i}"
        long = len(train) >= SMOOTH_FROM
        axes.plot(
            *train.T, color=color, alpha=0.25 if long else 0.8, linewidth=1, label=None if long else f"{name} train"
        )
        if long:
            axes.plot(train[:, 0], smoothed(train[:, 1]), color=color, linewidth=1.2, label=f"{name} train, smoothed")
        if len(val):
            axes.plot(
                *val.T, color=color, linestyle="--", marker="o", markersize=3, label=f"{name} val {val[-1, 1]:.4f}"
            )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot: cannot write {out}: {error.strerror}; choose another -o") from error


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a window of 1/50 of the curve, shorter at its ends, so that both ends stay where they are."""
    half = max(1, len(values) // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    center = np.arange(len(values))
    reach = np.minimum(half, np.minimum(center, len(values) - 1 - center))
    return (sums[center + reach + 1] - sums[center - reach]) / (2 * reach + 1)


def _curves(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """(step, loss) points [n, 2] of training and of validation; steps whose loss was not finite have none."""
    path = run / METRICS if run.is_dir() else run
    if not path.is_file():
        raise ConfigError(f"{run}: no {METRICS} there; expected a run directory, which train.py makes")
    records = read_metrics(path)
    train, val = _points(records, "loss"), _points(records, "val_loss")
    if not len(train) and not len(val):
        raise ConfigError(f"{path}: holds no losses yet; plot it after a step")
    return train, val


def _points(records: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([(r["step"], r[key]) for r in records if r.get(key) is not None], np.float64).reshape(-1, 2)
