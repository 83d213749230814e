"""`python -m gpt2_triton plot`: the panels and the legend show the values in metrics.jsonl."""

import json
import re
import shutil

import matplotlib.image
import numpy as np
import pytest

from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main
from gpt2_triton.commands.plot import COLORS, CURVES, NOT_COMPARABLE, OPENAI, smoothed
from gpt2_triton.commands.plot import draw_runs as plot
from gpt2_triton.commands.plot import plot as plot_command
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
    return [line.get_ydata()[0] for line in axes.lines if line.get_color() == "0.45"]


def test_openai_levels_are_drawn_near_fineweb_curves_or_on_request(panels, tmp_path):
    near = write_run(tmp_path / "near", 20, last=3.2)
    drawn = panels(near)
    assert levels(drawn["loss, nats per token"]) == [3.4250, 3.0831, 3.0006]
    assert drawn["legend"][1] == "OpenAI GPT-2 124M\nloss 3.425" and len(drawn["legend"]) == 4
    other = write_run(tmp_path / "other", 20, last=3.2, val="data/mytext/val_*.bin")
    assert levels(panels(other, near)["loss, nats per token"]) == []
    assert levels(panels(other, openai=True)["loss, nats per token"]) == [loss for loss, _ in OPENAI.values()]
    lines = plot([other, near], tmp_path / "a.svg", openai=True)
    assert lines == [f"other: its losses and those of OpenAI's GPT-2 are {NOT_COMPARABLE}"]


def test_fineweb_edu_is_not_fineweb(panels, tmp_path):
    edu = write_run(tmp_path / "edu", 20, last=3.2, val="data/fineweb-edu-100B/val_*.bin")
    assert levels(panels(edu)["loss, nats per token"]) == []
    lines = plot([edu], tmp_path / "a.svg", openai=True, beside=["modded_nanogpt_muon"])
    assert len(lines) == 2 and all(line.endswith(NOT_COMPARABLE) for line in lines)
    assert "(124M with rotary embeddings and RMSNorm, not GPT-2's architecture); not comparable" in lines[0]


def test_hellaswag_has_a_panel_when_it_was_measured(panels, tmp_path):
    drawn = panels(write_run(tmp_path / "run", 20, hellaswag=0.3, mfu=0.45))
    assert drawn["HellaSwag, %"].lines[0].get_ydata().tolist() == [30.0]
    assert levels(drawn["HellaSwag, %"]) == [29.45]
    assert drawn["legend"][0] == "run\nval 2.5000\n400k tokens/s, MFU 45%\nHellaSwag 30.0"
    assert drawn["legend"][1] == "OpenAI GPT-2 124M\nloss 3.425, HellaSwag 29.45"


def test_tasks_have_a_row_of_panels_when_they_were_measured(panels, tmp_path):
    scores = dict(piqa_acc=0.625, piqa_acc_norm=0.6, lambada_acc=0.25, lambada_perplexity=40.0)
    drawn = panels(write_run(tmp_path / "run", 20, **scores), write_run(tmp_path / "other", 20))
    assert [list(drawn).index(title) for title in ("LAMBADA, %", "PIQA, %")] == [4, 5] and len(drawn) == 7
    assert [drawn[title].lines[0].get_ydata().tolist() for title in ("LAMBADA, %", "PIQA, %")] == [[25.0], [62.5]]


def test_published_curves_are_laid_beside_runs_as_far_as_these_have_come(panels, tmp_path, capsys):
    run = write_run(tmp_path / "run", 20, last=3.5)
    records = [{"step": s, "loss": 4.0, "val_loss": 3.9, "tokens": s * 524_288} for s in (500, 1125)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    drawn = panels(run, beside=["gpt2_124m_llmc"])
    curve = next(line for line in drawn["loss, nats per token"].lines if line.get_color() == "0.2")
    assert curve.get_xydata()[[0, -1]].tolist() == [[0, 11.0092], [1000 * 524_288, 4.3170]]
    entry = next(text for text in drawn["legend"] if text.startswith("gpt2_124m_llmc"))
    assert entry.endswith("val 3.2722 after 10.3B")
    assert main(tools, ["plot", str(run), "--beside", "gpt2_124m_llmc", "-o", str(tmp_path / "a.svg")]) == 0
    line = capsys.readouterr().out.splitlines()[0]  # llm.c: 4.3170 after 1000 steps, 4.1296 after 1250
    assert line == "run: val loss 3.9000 at 590M tokens; gpt2_124m_llmc has 4.2233 there (GPT-2's architecture)"
    assert main(tools, ["plot", str(run), "--beside", "none", "-o", str(tmp_path / "a.svg")]) == 2
    assert "--beside: unknown curve none; known are gpt2_124m_llmc, " in capsys.readouterr().err


def test_every_published_curve_names_its_source():
    """And the help of `plot` lists it."""
    for name, path in CURVES.items():
        curve = json.loads(path.read_text())
        assert curve["source"].startswith("https://github.com/") and curve["title"] and curve["data"]
        steps = [step for step, _ in curve["val_loss"]]
        assert steps == sorted(set(steps)) and name in plot_command.__doc__
    assert len(CURVES) == 3


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


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 0, "val_loss": 3.0}',
        '{"step": 0, "loss": 3.0, "tokens": 100}',
        '{"step": 1, "loss": 3.0, "tokens": 0, "tok_s": 0.0, "norm": 0.0}',
        '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 1e999}',
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_run_that_has_only_begun_or_has_odd_numbers_is_drawn(panels, tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert panels(tmp_path)["loss, nats per token"].get_ylim()[0] < 3


@pytest.mark.parametrize(("suffix", "starts"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_ending_is_the_format_and_equal_runs_give_equal_bytes(tmp_path, suffix, starts):
    run = write_run(tmp_path / "run", 20)
    for name in ("a", "b"):
        plot([run], tmp_path / f"{name}{suffix}")
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("a", "b"))
    assert first.startswith(starts) and first == second
    assert not re.search(rb"CreationDate|<dc:date>|20[2-9]\d-\d\d-\d\d", first)


def test_another_ending_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"^-o: .*loss.jpg does not end in .png, .svg, .pdf; choose one of them$"):
        plot([tmp_path / "none"], tmp_path / "loss.jpg")


def drawn(picture, color):
    """Return the number of pixels of a colour, "#0072B2", in the left three quarters, where there is no legend."""
    pixels = (matplotlib.image.imread(picture)[:, :, :3] * 255).round().astype(int)
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return int((pixels[:, : 3 * pixels.shape[1] // 4] == wanted).all(2).sum())


def test_equal_runs_can_all_be_seen(tmp_path, count=3):
    """Each of n equal curves shows about as many pixels; the tolerance, half, is for dots, ends and antialiasing."""
    runs = [write_run(tmp_path / "first", 60)]
    runs += [shutil.copytree(runs[0], tmp_path / f"copy{i}") for i in range(1, count)]
    plot(runs, tmp_path / "loss.png")
    pixels = [drawn(tmp_path / "loss.png", color) for color in COLORS[:count]]
    assert min(pixels) > 0.5 * np.mean(pixels) and min(pixels) > 500, pixels
    plot(runs, tmp_path / "loss.svg")
    for color in COLORS[1:count]:  # one path in dashes for each of the four panels
        dashed = rf'style="fill: none; stroke-dasharray: [^"]*stroke: {color}'
        assert len(re.findall(dashed, (tmp_path / "loss.svg").read_text(), re.IGNORECASE)) == 4


def test_the_legend_says_which_losses_are_equal(panels, tmp_path):
    first = write_run(tmp_path / "first", 20)
    other = write_run(tmp_path / "other", 20, last=2.6)
    copy = shutil.copytree(first, tmp_path / "copy")
    legend = panels(first, other, copy)["legend"]
    assert [("losses equal to" in text) for text in legend[:3]] == [False, False, True]
    assert legend[2].endswith("\nlosses equal to\nfirst")


@pytest.mark.parametrize("count", [1, 7])
def test_no_label_is_clipped(monkeypatch, tmp_path, count):
    """Long names, and those that matplotlib would read as formulas or leave out."""
    from matplotlib.figure import Figure

    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), savefig(self, *a, **k)))
    names = ["_$x$_" + 60 * "w", *(f"gpt2_124m-a-long-name-of-an-experiment-with-lr-{i}e-4_again" for i in range(6))]
    runs = [write_run(tmp_path / name, 20, last=2.5 + i / 10, hellaswag=0.3) for i, name in enumerate(names[:count])]
    plot(runs, tmp_path / "loss.png", openai=True)
    [figure] = saved
    figure.draw_without_rendering()  # savefig leaves the places of its own resolution
    texts = [*figure.legends[0].get_texts(), *(axes.xaxis.label for axes in figure.axes)]
    texts += [text for axes in figure.axes for text in (axes.title, axes._left_title)]
    for axes in figure.axes:
        low, high = axes.get_ylim()
        texts += [text for y, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if low <= y <= high]
    whole, boxes = figure.bbox, {text.get_text(): text.get_window_extent() for text in texts if text.get_text()}
    assert len(boxes) > count + 5
    for text, box in boxes.items():
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1, text
    assert len(figure.legends[0].get_texts()) == count + 4
    assert r" _\$x\$_" in figure.legends[0].get_texts()[0].get_text()
    widest = max(axes.get_window_extent().width for axes in figure.axes)
    assert widest > 0.6 * whole.width  # the legend leaves the panels their room


def test_runs_of_equal_names_are_told_apart_by_their_directories(panels, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    legend = panels(write_run(tmp_path / "x" / "run", 20), write_run(tmp_path / "y" / "run", 20))["legend"]
    assert [text.splitlines()[0] for text in legend[:2]] == ["x/run", "y/run"]
