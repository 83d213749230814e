"""docs/guide/config.md is generated from the declarations of the configuration."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
table = runpy.run_path(str(DOCS / "config_table.py"))["table"]


def test_committed_config_table_is_current():
    current = (DOCS / "guide" / "config.md").read_text(encoding="utf-8") == table()
    assert current, "run `python docs/config_table.py > docs/guide/config.md`"
