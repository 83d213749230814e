"""Renders the record into pages and recipes, between markers.

    <!-- r: table steps --> ... <!-- /r -->
        a table of benchmarks/tables.py or tables.yaml
    # hours: 4.5  # r: recipe.gpt2_124m.hours
        in YAML: fills the word before #

Sentences have rounded figures: tests/benchmarks/sentences.yaml has their bounds.
"""

import re
from pathlib import Path

from benchmarks.figures import flat
from benchmarks.record import ROOT, Record
from benchmarks.tables import TABLES
from gpt2_triton.errors import DataError

TABLE = re.compile(r"(<!-- r: (.*?) -->)(.*?)(<!-- /r -->)", re.DOTALL)
HOURS = re.compile(r"(\S+)( +# r: (recipe\.\w+\.hours))$", re.MULTILINE)


def files() -> list[Path]:
    """Return the pages and recipes that may have markers."""
    documents = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "LOG.md"]
    return [ROOT / "README.md", *documents, *sorted((ROOT / "configs").glob("*.yaml"))]


def render(text: str, record: Record, page: Path) -> str:
    """Return the text of a page or a recipe with the record's figures; DataError
    names an unknown table or figure.
    """

    def table(match: re.Match[str]) -> str:
        begin, marker, _, end = match.groups()
        name = marker.removeprefix("table ")
        return f"{begin}\n{TABLES[name](record)}\n{end}"

    def hours(match: re.Match[str]) -> str:
        return f"{flat(record)[match[3]]:.1f}{match[2]}"

    try:
        return HOURS.sub(hours, text) if page.suffix == ".yaml" else TABLE.sub(table, text)
    except (KeyError, SyntaxError) as error:
        unknown = error.args[0]
        raise DataError(
            f"{page}: {unknown}: docs/results/current.json has no such figure or table"
        ) from None
