"""`python -m gpt2_triton plot`: the panels and the legend show the values in metrics.jsonl."""

import json

import numpy as np
import pytest

from gpt2_triton.commands.plot import OPENAI, smoothed
from gpt2_triton.commands.plot import draw_runs as plot
from gpt2_triton.errors import ConfigError

TOKENS = 1000  # per step


def write_run(directory, steps, last=2.5, val="data/fineweb10B/fineweb_val_*.bin", **more):
    directory.mkdir()
    records = [
        {
            "step": s,
            "loss": last + 1 / s if s != 5 else None,
            "lr": 1e-3,
            "norm": 1.0,
            "tok_s": 4e5,
            "tokens": s * TOKENS,
        }
        for s in range(1, steps + 1)
    ]
    records += [{"step": steps, "val_loss": last, **more}, {"step": steps, "sample": "text"}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"step": 9')
    (directory / "config.yaml").write_text(f"data:\n  tokenizer: gpt2\n  val: {val}\n")
    return directory


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """panels(*runs) plots runs and returns the panels by title, and the texts of the legend under "legend"."""
    from matplotlib.figure import Figure

    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), savefig(self, *a, **k)))

    def draw(*runs, **options):
        out = tmp_path / "new" / "loss.png"
        plot(runs, out, **options)
        assert out.read_bytes().startswith(b"\x89PNG")
        by_title = {axes.get_title(loc="left").partition(":")[0]: axes for axes in saved[-1].axes}
        return by_title | {"legend": [text.get_text() for text in saved[-1].legends[0].get_texts()]}

    return draw


def test_runs_are_overlaid_over_tokens_and_named_in_the_legend(panels, tmp_path):
    drawn = panels(write_run(tmp_path / "short", 20), write_run(tmp_path / "long", 500, last=3.0))
    assert list(drawn) == ["loss, nats per token", "learning rate", "gradient norm", "tokens per second", "legend"]
    loss = drawn["loss, nats per token"]
    assert loss.get_xlabel() == "tokens"
    named = [text for text in drawn["legend"] if "OpenAI" not in text]
    assert named == ["short\nval 2.5000\n400k tokens/s", "long\nval 3.0000\n400k tokens/s"]
    line = loss.lines[0].get_xydata()  # a step that was not finite has no point
    assert np.array_equal(line, [(s * TOKENS, 2.5 + 1 / s) for s in range(1, 21) if s != 5])
    assert loss.lines[1].get_xydata().tolist() == [[20 * TOKENS, 2.5]]
    assert len(loss.lines[2].get_xdata()) == 499 > len(loss.lines[3].get_xdata())  # behind the smoothed one


def levels(axes):
    return [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"]


def test_openai_levels_are_drawn_near_fineweb_curves_or_on_request(panels, tmp_path):
    near = write_run(tmp_path / "near", 20, last=3.2)
    drawn = panels(near)
    assert levels(drawn["loss, nats per token"]) == [3.4250, 3.0831, 3.0006]
    assert drawn["legend"][1] == "OpenAI GPT-2 124M\nloss 3.425" and len(drawn["legend"]) == 4
    other = write_run(tmp_path / "other", 20, last=3.2, val="data/mytext/val_*.bin")
    assert levels(panels(other, near)["loss, nats per token"]) == []
    assert levels(panels(other, openai=True)["loss, nats per token"]) == [loss for loss, _ in OPENAI.values()]


def test_hellaswag_has_a_panel_when_it_was_measured(panels, tmp_path):
    drawn = panels(write_run(tmp_path / "run", 20, hellaswag=0.3, mfu=0.45))
    assert drawn["HellaSwag, %"].lines[0].get_ydata().tolist() == [30.0]
    assert levels(drawn["HellaSwag, %"]) == [29.45]
    assert drawn["legend"][0] == "run\nval 2.5000\n400k tokens/s, MFU 45%\nHellaSwag 30.0"
    assert drawn["legend"][1] == "OpenAI GPT-2 124M\nloss 3.425, HellaSwag 29.45"


def test_runs_without_tokens_are_drawn_over_steps(panels, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
    loss = panels(tmp_path / "metrics.jsonl")["loss, nats per token"]
    assert loss.get_xlabel() == "steps" and loss.lines[0].get_xdata().tolist() == [1, 2]


def test_smoothing_keeps_straight_lines():
    """A symmetric window maps a straight line to itself; the tolerance is fp64 rounding of a sum over 1000 points."""
    line = np.stack([np.arange(1000.0), np.linspace(5, 3, 1000)], 1)
    assert np.allclose(smoothed(line), line[10:-10], rtol=0, atol=1e-9)
    noise = np.random.default_rng(0).standard_normal((1000, 2))
    assert smoothed(noise)[500 - 10] == pytest.approx(noise[490:511].mean(0))


def test_run_without_metrics_is_an_error_with_its_path(tmp_path):
    with pytest.raises(ConfigError, match="nothing: no metrics.jsonl there"):
        plot([tmp_path / "nothing"], tmp_path / "loss.png")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="metrics.jsonl: holds no losses yet"):
        plot([tmp_path], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
