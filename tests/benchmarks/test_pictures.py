"""benchmarks/pictures.py: no text is cut off, and figures have a date and a commit."""

import json

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from benchmarks import pictures


def beyond_the_edges(figure):
    """Return by how many inches the drawn texts and bars extend beyond the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box, (width, height) = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    return max(-box.x0, -box.y0, box.x1 - width, box.y1 - height)


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_nothing_is_cut_off(name):
    figures = json.loads((pictures.PICTURES / f"{name}.json").read_text())
    assert figures["measured"] and figures["commit"]
    figure = pictures.DRAWN[name](figures)
    assert beyond_the_edges(figure) <= 0
    figure.text(0.99, 0.5, "beyond the edge")
    assert beyond_the_edges(figure) > 0.1
