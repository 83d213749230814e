"""`python -m gpt2_triton plot`: the panels and the legend show the values in metrics.jsonl."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from gpt2_triton.commands.plot import CURVES, OPENAI, SMOOTH_FROM, smoothed
from gpt2_triton.commands.plot import draw_runs as plot
from gpt2_triton.commands.plot import plot as plot_command
from gpt2_triton.errors import ConfigError
from tests.support.commands import run_tool

TOKENS = 1000  # per step


def write_run(directory, steps, last=2.5, **more):
    directory.mkdir(parents=True)
    same = dict(lr=1e-3, norm=1.0, tok_s=4e5)
    records = [
        {"step": s, "loss": last + 1 / s if s != 5 else None, "tokens": s * TOKENS, **same}
        for s in range(1, steps + 1)
    ]
    records += [{"step": steps, "val_loss": last, **more}, {"step": steps, "sample": "text"}]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records) + '{"step": 9'
    )
    return directory


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """panels(*runs) plots runs and returns the panels by title, and the texts of
    the legend under "legend".
    """
    from matplotlib.figure import Figure

    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (saved.append(self), savefig(self, *a, **k))
    )

    def draw(*runs, **options):
        out = tmp_path / "new" / "loss.png"
        plot(runs, out, **options)
        assert out.read_bytes().startswith(b"\x89PNG")
        by_title = {axes.get_title(loc="left").partition(":")[0]: axes for axes in saved[-1].axes}
        by_title["loss"] = by_title.pop("loss, nats per token")
        return by_title | {"legend": [text.get_text() for text in saved[-1].legends[0].get_texts()]}

    return draw


def test_runs_are_overlaid_over_tokens_and_named_in_the_legend(panels, tmp_path):
    drawn = panels(write_run(tmp_path / "short", 20), write_run(tmp_path / "long", 500, last=3.0))
    assert drawn.keys() == {"learning rate", "gradient norm", "tokens per second", "loss", "legend"}
    assert drawn["legend"] == [
        "short\nval 2.5000\n400k tokens/s",
        "long\nval 3.0000\n400k tokens/s",
    ]
    assert drawn["loss"].get_xlabel() == "tokens"
    lines = [line.get_xydata() for line in drawn["loss"].lines]
    short, dots, _, raw, mean, *_ = lines
    # 5 was not finite
    assert np.array_equal(short, [(s * TOKENS, 2.5 + 1 / s) for s in range(1, 21) if s != 5])
    assert dots.tolist() == [[20 * TOKENS, 2.5]] and len(raw) == 499 > len(mean)


def test_runs_of_equal_names_are_told_apart_by_their_paths(panels, tmp_path):
    """A log that was kept aside is a run of its own."""
    one, other = (write_run(tmp_path / name / "run", 20) for name in "xy")
    runs = [one, (other / "metrics.jsonl").rename(other / "metrics.jsonl.2")]
    names = [text.splitlines()[:-2] for text in panels(*runs)["legend"]]
    assert [*map("".join, names)] == [*map(str, runs)]


def levels(axes):
    return [line.get_ydata()[0] for line in axes.lines if line.get_color() == "0.45"]


def test_hellaswag_has_a_panel_when_it_was_measured(panels, tmp_path):
    drawn = panels(write_run(tmp_path / "run", 20, hellaswag=0.3, mfu=0.45), openai=True)
    assert drawn["HellaSwag accuracy"].lines[0].get_ydata().tolist() == [0.3]
    assert levels(drawn["loss"]) == [loss for loss, _ in OPENAI.values()]
    assert drawn["legend"][1] == "OpenAI GPT-2 124M\nloss 3.425, HellaSwag 29.45"
    assert levels(drawn["HellaSwag accuracy"]) == [score for _, score in OPENAI.values()]
    assert drawn["legend"][0] == "run\nval 2.5000\n400k tokens/s, MFU 45%\nHellaSwag 30.0"


def test_published_curves_are_laid_beside_runs_as_far_as_these_have_come(panels, tmp_path, capsys):
    run = write_run(tmp_path / "run", 20, last=3.5)
    records = [
        {"step": s, "loss": 4.0, "val_loss": 3.9, "tokens": s * 524_288} for s in (500, 1125)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    drawn = panels(run, beside=["gpt2_124m_llmc"])
    curve = next(line for line in drawn["loss"].lines if line.get_color() == "0.2")
    assert curve.get_xydata()[[0, -1]].tolist() == [[0, 11.0092], [1000 * 524_288, 4.3170]]
    assert drawn["legend"][1].startswith("gpt2_124m_llmc\n")
    assert run_tool(f"plot {run} --beside gpt2_124m_llmc -o {tmp_path}/a.svg") == 0
    # llm.c: 4.3170 after 1000 steps, 4.1296 after 1250
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("run: val loss 3.9000 at 590M tokens; gpt2_124m_llmc has 4.2233")
    for tokenizer, noted in (("gpt2", False), ("bytes", True)):
        (run / "config.yaml").write_text(f"data:\n  tokenizer: {tokenizer}\n  windows: fixed\n")
        assert run_tool(f"plot {run} --openai -o {tmp_path}/a.svg") == 0
        assert ("run: its tokens are not GPT-2's" in capsys.readouterr().out) == noted
    assert run_tool(f"plot {run} --beside none -o {tmp_path}/a.svg") == 2
    assert "known are gpt2_124m_llmc, " in capsys.readouterr().err


def test_every_published_curve_names_its_source():
    """And the help of `plot` lists it."""
    for name, path in CURVES.items():
        curve = json.loads(path.read_text())
        assert (
            curve["source"].startswith("https://github.com/") and curve["title"] and curve["data"]
        )
        steps = [step for step, _ in curve["val_loss"]]
        assert steps == sorted(set(steps)) and name in plot_command.__doc__
    assert len(CURVES) == 3


def test_smoothing_keeps_straight_lines():
    """A symmetric window maps a straight line to itself; the tolerance is fp64 rounding
    of a sum over 1000 points.
    """
    line = np.stack([np.arange(1000.0), np.linspace(5, 3, 1000)], 1)
    assert np.allclose(smoothed(line), line[10:-10], rtol=0, atol=1e-9)
    few = line[: SMOOTH_FROM - 1]
    assert np.allclose(smoothed(few), few, rtol=0, atol=1e-9)


def test_run_without_metrics_is_an_error_with_its_path(tmp_path):
    with pytest.raises(ConfigError, match="nothing: no metrics.jsonl there"):
        plot([tmp_path / "nothing"], tmp_path / "loss.png")
    for records in ("", '{"step": 250, "val_loss": 3.0}\n'):  # the second run logs every 1000 steps
        (tmp_path / "metrics.jsonl").write_text(records)
        with pytest.raises(ConfigError, match="metrics.jsonl: holds no step with a loss yet"):
            plot([tmp_path], tmp_path / "loss.png")
    with pytest.raises(
        ConfigError, match=r"^-o: .*loss.jpg does not end in .png, .svg, .pdf; choose one of them$"
    ):
        plot([tmp_path], tmp_path / "loss.jpg")
    assert not (tmp_path / "loss.png").exists()


def test_a_short_run_shows_all_its_losses_and_says_where_a_published_curve_goes_on(
    panels, tmp_path
):
    run = write_run(tmp_path / "run", 120)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 0, "val_loss": 4.5}\n')
    drawn = panels(run, beside=["gpt2_124m_llmc"])
    low, top = drawn["loss"].get_ylim()
    assert 2.3 < low < 2.5 and 4.5 < top < 4.7
    assert drawn["legend"][1].endswith("\nits next loss is at 131M tokens")
    assert [
        drawn[title].get_ylim()[0]
        for title in ("learning rate", "gradient norm", "tokens per second")
    ] == [0] * 3


def test_the_first_fall_of_a_long_run_does_not_flatten_the_rest(panels, tmp_path):
    low, top = panels(write_run(tmp_path / "run", 500))["loss"].get_ylim()
    assert 2.49 < low < 2.5 and 2.5 < top < 2.6


def test_a_full_disk_is_named_and_leaves_no_picture(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = write_run(tmp_path / "run", 3)
    out = tmp_path / "loss.svg"
    monkeypatch.setattr(os, "fsync", refuse)
    assert run_tool(f"plot {run} -o {out}") == 2
    assert capsys.readouterr().err == f"error: {out}: No space left on device; make room\n"
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.filterwarnings("error")
def test_a_run_that_has_only_begun_is_drawn(panels, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3.0, "tokens": 100, "tok_s": 0.0, "norm": 0.0}\n'
    )
    drawn = panels(tmp_path)
    assert drawn["loss"].get_ylim()[0] < 3


@pytest.mark.slow
def test_a_picture_needs_no_backend(tmp_path):
    """Jupyter's shell cells have its own backend in the environment."""
    write_run(tmp_path / "run", 3)
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    plotting = [sys.executable, "-m", "gpt2_triton", "plot", "run", "-o", "a.png"]
    done = subprocess.run(plotting, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "wrote a.png\n")
