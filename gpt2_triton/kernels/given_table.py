"""GPT2_TRITON_TABLE: a file that `python -m benchmarks tune` wrote, which takes the place of this machine's table;
lines and records about the table in use.
"""

import os
from pathlib import Path

import torch

from gpt2_triton.errors import ConfigError
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.table_file import Table, read_table
from gpt2_triton.version import __version__

VARIABLE = "GPT2_TRITON_TABLE"


def given_file() -> Path | None:
    """Return the file that VARIABLE names, on a machine with a GPU."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given and _has_gpu() else None


def _has_gpu() -> bool:
    return not tuning.INTERPRET and torch.cuda.is_available()


def read() -> Table | None:
    """Return the table in the file that VARIABLE names, if any; ConfigError unless it is of this version and GPU."""
    file = given_file()
    if file is None:
        return None
    try:
        if not file.is_file():
            raise ConfigError(f"{file}: no such file")
        table = read_table(file)
        gpu = torch.cuda.get_device_name()
        if table.version != __version__:
            found = f"version {table.version}" if table.version else "no known version"
            raise ConfigError(f"{file} is of {found}, this is {__version__}")
        if not is_own(table, gpu):
            raise ConfigError(f"{file} is for {table.gpu}, this GPU is {gpu}")
        return table
    except ConfigError as error:
        todo = "write it again by `python -m benchmarks tune`, or unset the variable"
        raise ConfigError(f"{VARIABLE}: {error}; {todo}") from None


def is_own(table: Table, gpu: str) -> bool:
    """Return whether the table names the GPU of this name."""
    return table.gpu in gpu


def about() -> dict[str, str]:
    """Return the file, GPU, source and date of the table in use, for run.json."""
    file, found = given_file(), tuning.table()
    return dict(file=str(file or f"{tuning.table_name()}.json"), gpu=found.gpu, source=found.source, date=found.date)


def notice() -> str | None:
    """Return a line for the console about a table that VARIABLE names, or that was not measured on this GPU."""
    if not _has_gpu():
        return None
    gpu, found = torch.cuda.get_device_name(), tuning.table()
    if file := given_file():
        return f"launch parameters of {file} ({VARIABLE}), measured on {found.date}"
    own = is_own(found, gpu)
    if own and found.source == "measured":
        return None
    taken = f"{tuning.table_name()}'s rows"
    lacks = f"launch parameters are not measured on {gpu}: {taken}" if own else f"no table for {gpu}: {taken}"
    return f"{lacks}; `python -m benchmarks tune` in a checkout of version {__version__} may gain"
