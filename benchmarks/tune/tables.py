"""Tables of launch parameters as `benchmarks tune` writes them: one row per line, so that
a diff shows changed rows.
"""

import datetime
import json
import re
from pathlib import Path

from gpt2_triton import __version__
from gpt2_triton.kernels.table_file import TABLES, Key, Row, Table
from gpt2_triton.version import installed


def file_of(table: Table, name: str, device: str) -> Path:
    """Return this GPU's file in tables/, a new file if the table in use belongs to another GPU."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    slug = "-".join(word for word in words if word not in ("nvidia", "geforce"))
    return Path(str(TABLES)) / f"{name if table.names(device) else slug}.json"


def updated(table: Table, device: str, changes: dict[Key, Row]) -> Table:
    """Return this GPU's table: a copy of `table` with the changed rows."""
    own = table.names(device)
    return table._replace(
        gpu=table.gpu if own else device,
        capabilities=table.capabilities if own else [],
        source="measured",
        date=datetime.date.today().isoformat(),
        triton=installed("triton") or "unknown",
        notes=table.notes if own else [],
        rows=dict(table.rows) | changes,
        version=__version__,
    )


def text(table: Table) -> str:
    """Return the table as JSON, one row per line."""
    by_op: dict[str, dict[str, Row]] = {}
    for (op, dtype), row in table.rows.items():
        by_op.setdefault(op, {})[dtype] = row
    rows = []
    for op, by_dtype in by_op.items():
        first, *others = by_dtype.values()
        if others == [first]:
            by_dtype = {"any": first}
        lines = ",\n".join(
            f"      {json.dumps(dtype)}: {json.dumps(row)}" for dtype, row in by_dtype.items()
        )
        rows.append(f"    {json.dumps(op)}: {{\n{lines}\n    }}")
    fields = {
        k: v
        for k, v in table._asdict().items()
        if k not in ("notes", "rows") and (v or k != "version")
    }
    head = [f"  {json.dumps(k)}: {json.dumps(v)}," for k, v in fields.items()]
    notes = ",".join(f"\n    {json.dumps(note)}" for note in table.notes)
    notes = f'  "notes": [{notes}\n  ],' if notes else '  "notes": [],'
    return "\n".join(["{", *head, notes, '  "rows": {', ",\n".join(rows), "  }", "}", ""])
