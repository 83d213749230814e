"""Files that hold a JSON object: read, and changed by hand."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of the object, of none where there is no file; `...` removes a key."""
    content = read_json(path) if path.exists() else {}
    changed = content | changes
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not ...}))
