"""Launch parameters as data: operation and dtype -> blocks, warps, stages.  Nothing is tuned at run time.

tables/ has a file for each GPU, which `python -m benchmarks tune` rewrites.  It says which GPU it is for, the
compute capabilities whose other GPUs take it too, and whether its rows were measured there or are only known to
compile.  interpreter.json holds upper bounds: each block covers its whole dimension up to the bound.
"""

import functools
import json
import os
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

import torch

from gpt2_triton.errors import ConfigError

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
TABLES = resources.files("gpt2_triton.kernels") / "tables"
WITHOUT_GPU, OTHER_GPUS = "h200", "rtx4090"  # the latter's rows need the least shared memory

Key = tuple[str, str]  # operation, storage dtype
Row = dict[str, int]

_PRODUCT = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")
_ATTENTION = ("BLOCK_M", "BLOCK_N")
_LAYERNORM_BWD = ("ROWS", "STAGES", "PROGRAMS")
_DECODE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_S", "STAGES")
PARAMETERS: dict[str, tuple[str, ...]] = {
    "matmul": _PRODUCT,
    "matmul_dw": (*_PRODUCT, "WAVE"),
    "classifier_fwd": _PRODUCT,
    "classifier_dx": _PRODUCT,
    "classifier_rows": ("BLOCK_R", "BLOCK_C"),
    "encoder_fwd": ("BLOCK_R", "BLOCK_C"),
    "encoder_bwd_segments": ("BLOCK_S", "BLOCK_E", "BLOCK_C"),
    "encoder_bwd_hot": ("BLOCK_E", "BLOCK_C"),
    "encoder_bwd_wpe": ("BLOCK",),
    "attention_fwd": _ATTENTION,
    "attention_bwd_dkdv": _ATTENTION,
    "attention_bwd_dq": _ATTENTION,
    "attention_fwd_wide": _ATTENTION,
    "attention_bwd_dkdv_wide": _ATTENTION,
    "attention_bwd_dq_wide": _ATTENTION,
    "layernorm_fwd": ("ROWS",),
    "layernorm_bwd": _LAYERNORM_BWD,
    "layernorm_bwd_wide": _LAYERNORM_BWD,
    "adamw": ("BLOCK",),
    "decode_matmul": _DECODE,
    "decode_matvec": ("ELEMENTS",),
    "decode_attention": ("BLOCK_T", "STAGES"),
    "cache_fill": ("BLOCK",),
    "draw": ("BLOCK",),
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # Triton's own; a GPU's row has the first at least
DTYPES = ("bf16", "fp32")  # a table may say "any" for both

# What sizes a scratch, or cuts a sum, is the same for every GPU: memory is planned before the GPU is known, and a table
# changes the bits of a run as little as it can.  Only dW's tile may be narrower than Hopper's, and then needs less.
FIXED: dict[str, tuple[str, ...]] = {
    "matmul": ("BLOCK_M",),
    "matmul_dw": ("BLOCK_M", "BLOCK_K", "WAVE"),
    "classifier_fwd": ("BLOCK_N",),
    "attention_bwd_dkdv": ("BLOCK_N",),
    "attention_bwd_dq": ("BLOCK_M",),
    "attention_bwd_dkdv_wide": ("BLOCK_N",),
    "attention_bwd_dq_wide": ("BLOCK_M",),
    "layernorm_bwd": ("PROGRAMS",),
    "layernorm_bwd_wide": ("PROGRAMS",),
}


class TableError(ConfigError):
    """A table that does not fit the kernels; the message is one line with file, row, what is wrong, what is right."""


class Table(NamedTuple):
    gpu: str  # part of torch.cuda.get_device_name()
    capabilities: list[str]  # such as "9.0": other GPUs of these take this table
    source: str  # "measured" there, or "default": compiled for it, not measured
    date: str
    triton: str
    notes: list[str]
    rows: dict[Key, Row]


def read_table(file: Traversable) -> Table:
    """The table in a JSON file; TableError if it is not one, or does not fit the kernels."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{file.name}: cannot be read as JSON: {error}") from None
    expected = Table._fields
    if not isinstance(data, dict) or data.keys() != set(expected):
        got = ", ".join(data) if isinstance(data, dict) else type(data).__name__
        raise TableError(f"{file.name}: got {got}; expected exactly {', '.join(expected)}")
    if data["source"] not in ("measured", "default"):
        raise TableError(f"{file.name}: source is {data['source']!r}; expected 'measured' or 'default'")
    return Table(**data | dict(rows=_rows(file.name, data["rows"], options=data["gpu"] != "interpreter")))


def _rows(where: str, data: Any, options: bool) -> dict[Key, Row]:
    """Rows by (operation, dtype), "any" spelled out; every operation and dtype is there, and nothing else."""
    rows: dict[Key, Row] = {}
    if not isinstance(data, dict) or not all(isinstance(by_dtype, dict) for by_dtype in data.values()):
        raise TableError(f"{where}: rows are not operation: {{dtype: {{name: number}}}}, as in {WITHOUT_GPU}.json")
    for op, by_dtype in data.items():
        if op not in PARAMETERS:
            raise TableError(f"{where}: unknown operation {op}; known are {', '.join(PARAMETERS)}")
        for dtype, row in by_dtype.items():
            if dtype not in (*DTYPES, "any"):
                raise TableError(f"{where}: {op}: unknown dtype {dtype}; known are {', '.join(DTYPES)}, any")
            _check(f"{where}: {op} {dtype}", op, row, options)
            rows |= {(op, d): dict(row) for d in (DTYPES if dtype == "any" else (dtype,))}
    missing = [f"{op} {dtype}" for op in PARAMETERS for dtype in DTYPES if (op, dtype) not in rows]
    if missing:
        raise TableError(f"{where}: no row for {', '.join(missing)}; add it, as in {WITHOUT_GPU}.json")
    return rows


def _check(where: str, op: str, row: Row, options: bool) -> None:
    needed = (*PARAMETERS[op], "num_warps") if options else PARAMETERS[op]
    known = (*PARAMETERS[op], *OPTIONS) if options else PARAMETERS[op]
    for name in (*needed, *row):
        if name not in row:
            raise TableError(f"{where}: {name} is missing; expected {', '.join(needed)}")
        if name not in known:
            raise TableError(f"{where}: unknown {name}; expected {', '.join(known)}")
        value, power = row[name], name.startswith("BLOCK") or name in ("ROWS", "num_warps")
        if type(value) is not int or value < 1 or (power and value & (value - 1)):
            kind = "power of 2" if power else "positive integer"
            raise TableError(f"{where}: {name} is {value!r}; expected a {kind}")


def choose(gpu: str, capability: str, tables: dict[str, Table]) -> str:
    """The name of the table for a GPU: its own, else that of its compute capability, else the most frugal one."""
    own = (name for name, table in tables.items() if table.gpu in gpu)
    same = (name for name, table in tables.items() if capability in table.capabilities)
    return next(own, None) or next(same, OTHER_GPUS)


@functools.cache
def table_name() -> str:
    """The file in tables/, without .json, for this machine.  Without a GPU, plans are made for an H200."""
    if INTERPRET:
        return "interpreter"
    if not torch.cuda.is_available():
        return WITHOUT_GPU
    tables = {f.name.removesuffix(".json"): read_table(f) for f in TABLES.iterdir() if f.name.endswith(".json")}
    major, minor = torch.cuda.get_device_capability()
    return choose(torch.cuda.get_device_name(), f"{major}.{minor}", tables)


@functools.cache
def table() -> Table:
    return read_table(TABLES / f"{table_name()}.json")


@functools.cache
def num_sms() -> int:
    """Programs of a persistent kernel: one per multiprocessor of this GPU; two in the interpreter."""
    return 2 if INTERPRET else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def is_hopper() -> bool:
    """Is this machine's GPU one that hopper.py's kernels are for (sm_90: H100, H200)?"""
    return not INTERPRET and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tuned(op: str, dtype: str, **sizes: int) -> Row:
    """Launch parameters of `op` for storage dtype "bf16" or "fp32", a dict of the caller's own.

    `sizes` gives the dimension that each block runs along, as in `tuned("matmul", "bf16", BLOCK_M=R, BLOCK_N=N)`;
    only the interpreter uses them, to make a block cover its dimension (a power of two, at least 16).
    """
    row = dict(table().rows[op, dtype])
    if INTERPRET:
        for block, size in sizes.items():
            row[block] = min(row[block], max(16, next_power_of_2(size)))
    return row


def dtype_name(tensor) -> str:
    """ "bf16" or "fp32", the storage dtype of a tensor, as the tables spell it."""
    return {2: "bf16", 4: "fp32"}[tensor.element_size()]
