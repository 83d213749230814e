"""The files of launch parameters in tables/: their format, and which of them a GPU takes.

Each GPU has one, which `python -m benchmarks tune` rewrites.  A table names its GPU, the architectures whose other GPUs
use it too, and whether its rows were measured there or are only known to compile.  interpreter.json holds upper bounds:
each block covers its whole dimension up to the bound.
"""

import json
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from gpt2_triton.errors import ConfigError

TABLES = resources.files("gpt2_triton.kernels") / "tables"
WITHOUT_GPU = "h200"
OTHER_GPUS, OTHER_AMD_GPUS = "rtx4090", "rdna3"  # their rows need the least shared memory
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # Triton's own; a GPU's row has at least the first
DTYPES = ("bf16", "fp32")  # a table may say "any" for both

Key = tuple[str, str]  # operation, storage dtype
Row = dict[str, int]


class Table(NamedTuple):
    gpu: str  # part of torch.cuda.get_device_name()
    capabilities: list[str]  # `architecture` of other GPUs that use this table
    source: str  # "measured" there, or "default": compiled for it, not measured
    date: str
    triton: str
    notes: list[str]
    rows: dict[Key, Row]
    version: str = ""  # of this package, when `tune` wrote the file


def read_table(file: Traversable) -> Table:
    """Return the table in a JSON file, with "any" replaced by both dtypes; raise ConfigError if it is unusable."""
    table = _parse(file)
    for key, complete in _parse(TABLES / f"{WITHOUT_GPU}.json").rows.items():
        names = {name for name in complete if name not in OPTIONS}
        row = table.rows.get(key, {})
        if names != {name for name in row if name not in OPTIONS} or not all(type(n) is int for n in row.values()):
            expected = f"{', '.join(sorted(names))} and their integers, as in {WITHOUT_GPU}.json"
            raise ConfigError(f"{file.name}: row {' '.join(key)} is {row or 'missing'}; expected {expected}")
    return table


def _parse(file: Traversable) -> Table:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        rows = {
            (op, dtype): dict(row)
            for op, by_dtype in data["rows"].items()
            for spelled, row in by_dtype.items()
            for dtype in (DTYPES if spelled == "any" else (spelled,))
        }
        return Table(**data | dict(rows=rows))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file.name}: not a tuning table like {WITHOUT_GPU}.json ({reason})") from None


def choose(gpu: str, architecture: str, tables: dict[str, Table]) -> str:
    """Return the name of the table for a GPU: its own, else its architecture's, else its vendor's most frugal one."""
    own = (name for name, table in tables.items() if table.gpu in gpu)
    same = (name for name, table in tables.items() if architecture in table.capabilities)
    return next(own, None) or next(same, OTHER_AMD_GPUS if architecture.startswith("gfx") else OTHER_GPUS)
