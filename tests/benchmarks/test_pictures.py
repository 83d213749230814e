"""benchmarks/pictures.py: no text is cut off, and the figures are those of the pages."""

import json

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks import pictures
from tests.support.pages import ROOT

ENGINEERING = ROOT / "docs" / "engineering"


def figures_of(name):
    return json.loads((pictures.PICTURES / f"{name}.json").read_text())


def beyond_the_edges(figure):
    """Return by how many inches the drawn texts and bars extend beyond the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    return max(-box.x0, -box.y0, box.x1 - width, box.y1 - height)


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_nothing_is_cut_off(name):
    assert beyond_the_edges(pictures.DRAWN[name](figures_of(name))) <= 0


def test_both_precisions_are_drawn_side_by_side():
    """An operation that one of them has not, cast_operand, has one bar."""
    bf16 = figures_of("ops_d12")["precisions"][0] | dict(joules=71.2)
    kinds = [o | dict(ms=0.7 * o["ms"]) for o in bf16["operations"]] + [dict(name="cast_operand", ms=1.0, floor_ms=0.9)]
    figure = pictures.precisions([bf16, bf16 | dict(precision="fp8", joules=None, operations=kinds)])
    assert beyond_the_edges(figure) <= 0
    [axes] = figure.axes
    assert "cast_operand" in [label.get_text() for label in axes.get_yticklabels()]
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    step = f"step {bf16['step_ms']:.1f} ms"
    assert labels == {"floor", f"bf16: {step}, 71.2 J", f"fp8: {step}"}


def test_a_text_that_is_cut_off_is_found():
    figure = pictures.operations(figures_of("ops_d12")["precisions"][0])
    assert beyond_the_edges(figure) <= 0
    figure.text(0.99, 0.5, "beyond the edge")
    assert beyond_the_edges(figure) > 0.1


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_every_picture_has_figures_with_their_date_and_commit(name):
    figures = figures_of(name)
    assert figures["measured"] and figures["commit"]
    assert (pictures.PICTURES / f"{name}.png").exists()


def test_figures_of_the_comparison_are_those_of_the_pages():
    figures, page = figures_of("comparison"), (ENGINEERING / "performance.md").read_text()
    for i, size in enumerate(figures["sizes"]):
        row = next(line for line in page.splitlines() if line.startswith(f"| {size} (d"))
        for program in ("gpt2_triton", "PyTorch"):
            assert f"| {figures['tokens_per_second'][program][i]:,} |" in row
            assert f"| {figures['memory_gib'][program][i]:.2f} |" in row
    rates = "{:.0f}k, {:.0f}k, {:.0f}k and {:.1f}k tokens/s".format(
        *(rate / 1e3 for rate in figures["tokens_per_second"]["llm.c"])
    )
    assert f"{rates}; {figures['memory_gib']['llm.c'][0]} GiB at 124M" in page
    losses, numerics = figures["loss"], (ENGINEERING / "numerics.md").read_text()
    for values in (losses["PyTorch"], *losses["ours"].values()):
        assert "| " + " | ".join(f"{value:.4f}" for value in values) + " |" in numerics


def test_percentages_in_the_readme_are_those_of_the_picture():
    figures, readme = figures_of("comparison"), (ROOT / "README.md").read_text()
    rates, gib = figures["tokens_per_second"], figures["memory_gib"]

    def percent(ours, theirs, sign):
        found = [sign * (100 * a / b - 100) for a, b in zip(ours, theirs, strict=True)]
        return f"{int(min(found))} to {int(max(found))}%"  # rounded down

    more = [percent(rates["gpt2_triton"], rates[other], 1) for other in ("PyTorch", "llm.c")]
    less = percent(gib["gpt2_triton"], gib["PyTorch"], -1)
    expected = "{} more tokens per second than PyTorch, {} more than llm.c; {} less memory than PyTorch."
    assert expected.format(*more, less) in readme


def test_figures_of_operations_are_those_of_the_pages():
    page = (ENGINEERING / "performance.md").read_text()
    for name, figures in zip(("d12, B 64", "d12, fp8"), figures_of("ops_d12")["precisions"], strict=True):
        assert f"| {name} | {figures['step_ms']} | {figures['floors_ms']} |" in page
        kinds = {operation["name"]: operation for operation in figures["operations"]}
        dgelu = kinds["matmul_dx_dgelu"]
        assert f"| {dgelu['ms']} ({dgelu['floor_ms']}) |" in page
        # the operations that are not shown take less than 0.3% each
        assert 0.97 < sum(o["floor_ms"] for o in kinds.values()) / figures["floors_ms"] <= 1.003
