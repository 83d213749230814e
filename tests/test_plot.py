"""Plots: the picture exists and shows what the metrics say."""

import json

import numpy as np
import pytest

from gpt2_triton.config import ConfigError
from gpt2_triton.plot import plot, smoothed


def write_run(directory, steps):
    directory.mkdir()
    records = [{"step": s, "loss": 10 / s if s != 5 else None} for s in range(1, steps + 1)]
    records += [{"step": steps, "val_loss": 2.5}, {"step": steps, "sample": "text"}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"step": 9')
    return directory


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure

    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), savefig(self, *a, **k)))
    return saved


def test_runs_are_overlaid_in_one_png(tmp_path, figures):
    runs = [write_run(tmp_path / "short", 20), write_run(tmp_path / "long", 500)]
    out = tmp_path / "new" / "loss.png"
    plot(runs, out)
    assert out.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "step" and axes.get_ylabel() == "loss (nats per token)"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["short train", "short val 2.5000", "long train, smoothed", "long val 2.5000"]
    short = axes.lines[0].get_xydata()
    assert np.array_equal(
        short, [(s, 10 / s) for s in range(1, 21) if s != 5]
    )  # a step that was not finite has no point
    assert len(axes.lines) == 5 and len(axes.lines[2].get_xdata()) == 499  # the raw curve behind the smoothed one


def test_smoothing_keeps_lines_and_ends():
    """A symmetric window maps a straight line to itself; the tolerance is fp64 rounding of a sum over 1000 points."""
    line = np.linspace(5, 3, 1000)
    assert np.allclose(smoothed(line), line, rtol=0, atol=1e-9)
    noise = np.random.default_rng(0).standard_normal(1000)
    assert smoothed(noise)[0] == noise[0] and smoothed(noise)[-1] == pytest.approx(noise[-1])
    assert smoothed(noise)[500] == pytest.approx(noise[490:511].mean())


def test_a_run_without_metrics_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="nothing: no metrics.jsonl there"):
        plot([tmp_path / "nothing"], tmp_path / "loss.png")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="metrics.jsonl: holds no losses yet"):
        plot([tmp_path], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
