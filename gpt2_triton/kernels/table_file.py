"""The files of launch parameters in tables/, one for each tuned GPU, and which of them is in use.

`python -m benchmarks tune` writes them.  GPT2_TRITON_TABLE names another file for this machine.
interpreter.json holds upper bounds: each block covers its whole dimension up to the bound.
"""

import functools
import json
import os
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

import torch

from gpt2_triton.device import architecture, is_called
from gpt2_triton.errors import ConfigError

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
VARIABLE = "GPT2_TRITON_TABLE"
TABLES = resources.files("gpt2_triton.kernels") / "tables"
WITHOUT_GPU = "h200"
OTHER_GPUS, OTHER_AMD_GPUS = "rtx4090", "rdna3"  # their rows need the least shared memory
# Triton's launch options; a GPU's row has at least num_warps
OPTIONS = ("num_warps", "num_stages", "maxnreg")
DTYPES = ("bf16", "fp32")  # a table may say "any" for both

Key = tuple[str, str]  # operation, storage dtype
Row = dict[str, int]


class Table(NamedTuple):
    """Block sizes and launch options for a kind of GPU, as kernels/tables/*.json has them."""

    gpu: str  # part of torch.cuda.get_device_name()
    capabilities: list[str]  # `architecture` of other GPUs that use this table
    source: str  # "measured" on that GPU, or "default": compiled for it, not measured
    date: str
    triton: str
    notes: list[str]
    rows: dict[Key, Row]
    version: str = ""  # the version of this package that wrote the file

    def names(self, gpu: str) -> bool:
        """Return whether the table was made for the GPU of this name."""
        return is_called(gpu, self.gpu)


def read_table(file: Traversable) -> Table:
    """Return the table in a JSON file; ConfigError if a row or a block that
    the kernels need is missing.
    """
    table = _parse(file)
    for (op, dtype), needed in _parse(TABLES / f"{WITHOUT_GPU}.json").rows.items():
        row = table.rows.get((op, dtype), {})
        if needed.keys() - OPTIONS != row.keys() - OPTIONS or not all(
            type(n) is int for n in row.values()
        ):
            expected = ", ".join(sorted(needed.keys() - OPTIONS))
            raise ConfigError(
                f"{file.name}: row {op} {dtype} is {row or 'missing'}; expected integers {expected}"
            )
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
        raise ConfigError(
            f"{file.name}: not a table in the form of {WITHOUT_GPU}.json "
            f"({type(error).__name__}: {error})"
        ) from None


def choose(gpu: str, capability: str, tables: dict[str, Table]) -> str:
    """Return the name of the table for a GPU: its own, else its architecture's, else its
    vendor's most frugal table.
    """
    own = (name for name, table in tables.items() if table.names(gpu))
    same = (name for name, table in tables.items() if capability in table.capabilities)
    return next(own, None) or next(
        same, OTHER_AMD_GPUS if capability.startswith("gfx") else OTHER_GPUS
    )


@functools.cache
def table_name() -> str:
    """Return the name of this machine's file in tables/, without .json.  Without a GPU,
    memory is planned by h200.
    """
    if INTERPRET:
        return "interpreter"
    if not torch.cuda.is_available():
        return WITHOUT_GPU
    tables = {
        f.name.removesuffix(".json"): read_table(f)
        for f in TABLES.iterdir()
        if f.name.endswith(".json")
    }
    return choose(torch.cuda.get_device_name(), architecture(), tables)


@functools.cache
def table() -> Table:
    """Return the table in use: the file of GPT2_TRITON_TABLE, else this machine's;
    ConfigError for an unusable file.
    """
    file = given_file()
    if file is None:
        return read_table(TABLES / f"{table_name()}.json")
    try:
        found = read_table(file)
        gpu = torch.cuda.get_device_name()
        if not found.names(gpu):
            raise ConfigError(f"{file} is for {found.gpu}, this GPU is {gpu}")
    except ConfigError as error:
        todo = "write it again by `python -m benchmarks tune`, or unset the variable"
        raise ConfigError(f"{VARIABLE}: {error}; {todo}") from None
    return found


def given_file() -> Path | None:
    """Return the file that GPT2_TRITON_TABLE names, on a machine with a GPU."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given and not INTERPRET and torch.cuda.is_available() else None


def about() -> dict[str, str]:
    """Return the file, GPU, source and date of the table in use, for run.json."""
    file = given_file() or f"{table_name()}.json"
    return dict(file=str(file), gpu=table().gpu, source=table().source, date=table().date)


def notice() -> str | None:
    """Return a line for the console about a table that is given, or that was
    not measured on this GPU.
    """
    if INTERPRET or not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_name()
    found = table()
    file = given_file()
    if file:
        return f"launch parameters of {file} ({VARIABLE}), measured on {found.date}"
    if found.names(gpu) and found.source == "measured":
        return None
    lacks = (
        f"launch parameters are not measured on {gpu}"
        if found.names(gpu)
        else f"no launch parameters for {gpu}"
    )
    return (
        f"{lacks}: using {table_name()}'s; `python -m benchmarks tune` "
        "in a checkout may find faster ones"
    )
