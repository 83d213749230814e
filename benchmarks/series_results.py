"""The results of a series, a JSON object per run and line."""

import json
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def read_results(path: Path) -> list[Result]:
    """Return the results of a file, without a last line that was cut short; none if there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
