"""Launch parameters as data: operation and dtype -> blocks, warps, stages.  Nothing is tuned at run time.

tables/ has a file for each GPU, which `python -m benchmarks tune` rewrites.  A table names its GPU, the
compute capabilities whose other GPUs use it too, and whether its rows were measured there or are only known to compile.
interpreter.json holds upper bounds: each block covers its whole dimension up to the bound.

Blocks that size a scratch buffer or split a sum are the same in all tables (benchmarks/candidates.py lists them):
memory is planned before the GPU is known, and a table changes the bits of a run as little as it can.
"""

import functools
import json
import os
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

import torch

from gpt2_triton.errors import ConfigError

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
TABLES = resources.files("gpt2_triton.kernels") / "tables"
WITHOUT_GPU, OTHER_GPUS = "h200", "rtx4090"  # the latter's rows need the least shared memory
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # Triton's own; a GPU's row has at least the first
DTYPES = ("bf16", "fp32")  # a table may say "any" for both

Key = tuple[str, str]  # operation, storage dtype
Row = dict[str, int]


class Table(NamedTuple):
    gpu: str  # part of torch.cuda.get_device_name()
    capabilities: list[str]  # such as "9.0": other GPUs of these use this table
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


def choose(gpu: str, capability: str, tables: dict[str, Table]) -> str:
    """Return the name of the table for a GPU: its own, else its compute capability's, else the most frugal one."""
    own = (name for name, table in tables.items() if table.gpu in gpu)
    same = (name for name, table in tables.items() if capability in table.capabilities)
    return next(own, None) or next(same, OTHER_GPUS)


@functools.cache
def table_name() -> str:
    """Return the name of this machine's file in tables/, without .json: h200 without a GPU, to plan memory."""
    if INTERPRET:
        return "interpreter"
    if not torch.cuda.is_available():
        return WITHOUT_GPU
    tables = {f.name.removesuffix(".json"): read_table(f) for f in TABLES.iterdir() if f.name.endswith(".json")}
    major, minor = torch.cuda.get_device_capability()
    return choose(torch.cuda.get_device_name(), f"{major}.{minor}", tables)


@functools.cache
def table() -> Table:
    from gpt2_triton.kernels import given_table  # reads it with functions of this module

    return given_table.read() or read_table(TABLES / f"{table_name()}.json")


@functools.cache
def num_sms() -> int:
    """Return the number of programs of a persistent kernel: one per multiprocessor; two in the interpreter."""
    return 2 if INTERPRET else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def programs(tiles: int) -> int:
    """Return the number of programs of a persistent kernel that walks so many tiles."""
    return min(num_sms(), tiles)


@functools.cache
def is_hopper() -> bool:
    """Return True on the GPUs that kernels/hopper is for (sm_90: H100, H200)."""
    return not INTERPRET and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tuned(op: str, dtype: str, **sizes: int) -> Row:
    """Return a new dict of the launch parameters of `op` for storage dtype "bf16" or "fp32", or "fp8": those of bf16,
    with blocks of as many bytes along the contraction.

    `sizes` gives the dimension that each block runs along, as in `tuned("matmul", "bf16", BLOCK_M=R, BLOCK_N=N)`.
    Only the interpreter uses them, to make a block cover its dimension (a power of two, at least 16).
    """
    row = dict(table().rows[op, "bf16" if dtype == "fp8" else dtype])
    if dtype == "fp8":
        row["BLOCK_K"] *= 2
    if INTERPRET:
        for block, size in sizes.items():
            row[block] = min(row[block], max(16, next_power_of_2(size)))
    return row


def dtype_name(tensor: torch.Tensor) -> str:
    """Return a tensor's storage dtype as the tables spell it, "bf16", "fp32" or "fp8"."""
    return {1: "fp8", 2: "bf16", 4: "fp32"}[tensor.element_size()]
