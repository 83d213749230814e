"""The file beside a table in which a search keeps its measurements, so that it can be interrupted and continued.

One JSON object per line: what the search is (versions, GPU, sizes, candidates), then the measurements in their order,
and a line for each size that is complete.  A record of another search is replaced.
"""

import json
from pathlib import Path
from typing import Any

from gpt2_triton.console import LogFile
from gpt2_triton.files import write_atomic


class Record:
    """The measurements of the passes of a search: of each candidate the milliseconds, or why it is dropped."""

    def __init__(self, path: Path, search: dict[str, Any]):
        """Read what is there of the same search, and keep only that."""
        self.path = path
        lines = _read(path)
        self.replaced = bool(lines) and lines[0] != json.loads(json.dumps(search))
        self.lines = lines if lines and not self.replaced else [search]
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in self.lines).encode())
        self._file = LogFile(path)

    @property
    def measurements(self) -> int:
        """The number of measurements that are there."""
        return sum("op" in line for line in self.lines)

    def is_complete(self, name: str, size: str) -> bool:
        return {"pass": name, "size": size} in self.lines

    def of(self, name: str, size: str) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the measurements of a size in a pass, by call and operation."""
        own = (line for line in self.lines if "op" in line and (line["pass"], line["size"]) == (name, size))
        return {(line["call"], line["op"]): line for line in own}

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")

    def remove(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the file up to the first that is cut off."""
    lines: list[dict[str, Any]] = []
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            lines.append(json.loads(text))
    except (OSError, ValueError):
        pass
    return lines
