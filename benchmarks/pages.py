"""Fills figures of the record into pages and recipes, between markers.

    <!-- r: h100.steps.d12.torch.ms / h100.steps.d12.fp8.ms | x -->1.52x<!-- /r -->
        arithmetic on keys, a format
    <!-- r: losses.pairs.fp8_d12.muon_fp8.val | pm -->+0.003 ± 0.004<!-- /r -->
        a mean and half its 95% interval
    <!-- r: table steps --> ... <!-- /r -->
        a table of benchmarks/tables.py
    # hours: 4.5  # r: recipe.gpt2_124m.hours
        in YAML: fills the word before #

A key is SECTION.FIGURE.  benchmarks/figures.py computes three more figures.
"""

import re
from pathlib import Path
from typing import Any

from benchmarks.figures import Record, flat, value_of
from benchmarks.tables import TABLES
from gpt2_triton.errors import DataError

ROOT = Path(__file__).parents[1]
INLINE = re.compile(r"(<!-- r: (.*?) -->)(.*?)(<!-- /r -->)", re.DOTALL)
YAML = re.compile(r"(\S+)( +# r: (.*))$", re.MULTILINE)
UNITS = {  # factor, format, text after the number; in a marker, 3x means x with three decimals
    "k": (1e-3, ".3g", "k"), "M": (1e-6, ".3g", "M"), "B": (1e-9, ".3g", "B"),
    "%": (100, ".0f", "%"), "x": (1, ".2f", "x"), "W": (1, ".0f", " W"),
    **{unit: (1, ".1f", f" {unit}") for unit in "ms s h J GiB".split()},
}  # fmt: skip


def files() -> list[Path]:
    """Return the pages and recipes that may have markers."""
    documents = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "LOG.md"]
    return [ROOT / "README.md", *documents, *sorted((ROOT / "configs").glob("*.yaml"))]


def text_of(marker: str, figures: dict[str, Any]) -> str:
    """Return the text of a marker, which is an expression and a format, as in `a.b / c.d | x`."""
    expression, _, form = (part.strip() for part in marker.partition("|"))
    if form == "pm":
        mean, half = (figures[f"{expression}.{part}"] for part in ("mean", "half_width"))
        return f"{mean:+.3f} ± {half:.3f}"
    value = value_of(expression, figures)
    unit = form.lstrip("0123456789")
    digit = form.removesuffix(unit)
    if unit in UNITS:
        factor, usual, behind = UNITS[unit]
        return f"{factor * value:{f'.{digit}f' if digit else usual}}{behind}"
    if form and not re.fullmatch(r"\+?,?\.\df", form):
        raise KeyError(f"format {form}")
    return f"{value:{form}}"


def render(text: str, record: Record, page: Path) -> str:
    """Return the text of a page or a recipe with the record's figures;
    DataError names an unknown key.
    """
    figures = flat(record)

    def filled(match: re.Match[str]) -> str:
        begin, marker, _, end = match.groups()
        kind, _, name = marker.partition(" ")
        if kind == "table":
            return f"{begin}\n{TABLES[name](record)}\n{end}"
        return begin + text_of(marker, figures) + end

    def word(match: re.Match[str]) -> str:
        form = " | h" if match[3].endswith(".hours") else ""
        return text_of(match[3] + form, figures).partition(" ")[0] + match[2]

    try:
        return YAML.sub(word, text) if page.suffix == ".yaml" else INLINE.sub(filled, text)
    except (KeyError, SyntaxError) as error:
        unknown = error.args[0]
        raise DataError(
            f"{page}: {unknown}: docs/results/current.json has no such figure, format or table"
        ) from None
