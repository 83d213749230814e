"""metrics.jsonl, the only record of a run's numbers; Weights & Biases and plots are made from it.

One object per line, each with `step`, the number of finished steps; docs/guide/logging.md lists the
keys.  Numbers that are not finite are null, since JSON has no NaN.
"""

import json
import math
from pathlib import Path
from typing import Any

from gpt2_triton.console import print_line
from gpt2_triton.files import write_atomic

METRICS = "metrics.jsonl"
RUN = "run.json"
# tensor statistics, a number per layer; kept and truncated like metrics.jsonl
STATS = "stats.jsonl"

Record = dict[str, Any]


def null_non_finite(record: Record) -> Record:
    """Return the record with None in place of numbers that are not finite."""
    return {
        key: None if isinstance(v, float) and not math.isfinite(v) else v
        for key, v in record.items()
    }


def line_of(record: Record) -> str:
    """Return a record as a line of JSON, in Unicode."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[Record]:
    """Return the records, without a last line that a crash cut short, and without
    damaged ones, with a warning.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line for line in file if line.endswith("\n")]
    records = [_record(line) for line in lines if line.strip()]
    damaged = records.count(None)
    if damaged:
        print_line(
            f"warning: {path}: damaged lines left out: {damaged:,} of {len(records):,}, "
            f"the first is line {records.index(None) + 1:,}",
            error=True,
        )
    return [record for record in records if record is not None]


def _record(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def truncate(path: Path, resume_step: int) -> list[Record]:
    """Keep and return the records up to resume_step.  A new run has
    resume_step 0 and keeps none.
    """
    if not path.exists():
        return []
    kept = []
    if resume_step:
        kept = [record for record in read_metrics(path) if record["step"] <= resume_step]
    lines = "".join(line_of(record) for record in kept)
    write_atomic(path, lines.encode(errors="backslashreplace"))  # half of a surrogate pair
    return kept
