"""The launcher's environment variables: torchrun's, or srun's translated to torchrun's."""

import os
import re

from gpt2_triton.errors import ConfigError

OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # Open MPI's and MPICH's
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def set_env_from_slurm() -> None:
    """Set torchrun's variables in one of several tasks of srun, which have
    SLURM_STEP_ID; a batch script has none.
    """
    env = os.environ
    if "RANK" in env or "SLURM_STEP_ID" not in env:
        return
    size = _number("SLURM_STEP_NUM_TASKS", "1")
    if size == 1:
        return
    rank = _number("SLURM_PROCID")
    local_rank = _number("SLURM_LOCALID")
    # job steps may overlap
    port = 20000 + (_number("SLURM_JOB_ID") + 101 * _number("SLURM_STEP_ID")) % 20000
    values = (rank, size, local_rank, first_host(env.get("SLURM_STEP_NODELIST", "")), port)
    found = dict(zip(NAMES, map(str, values), strict=True))
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        found["LOCAL_WORLD_SIZE"] = str(size)
    env.update({name: value for name, value in found.items() if name not in env})


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: gpu03 of "gpu[03-05,9],login1"."""
    return re.sub(r"^([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?.*", r"\1\2\3", nodes)


def rank_and_size() -> tuple[int, int]:
    """Return (rank, number of ranks), or (0, 1) without a launcher; ConfigError for a missing
    variable, and for mpirun, each of whose processes would be a run of its own.
    """
    for name in OF_MPI:
        if "WORLD_SIZE" not in os.environ and _number(name, "1") > 1:
            raise ConfigError(
                f"mpirun sets {name}, but no RANK: start with torchrun or srun, or unset {name}"
            )
    rank = _number("RANK", "0")
    size = _number("WORLD_SIZE", "1")
    missing = [name for name in NAMES if name not in os.environ]
    if (size > 1 or rank > 0) and missing:
        todo = "start with torchrun or srun, or unset RANK and WORLD_SIZE"
        error = ConfigError(f"rank {rank} of {size}, but {', '.join(missing)} not set; {todo}")
        error.on_every_rank = False  # without LOCAL_RANK no rank but 0 would print it
        raise error
    return rank, size


def _number(name: str, default: str = "") -> int:
    """Return an environment variable as a number; ConfigError if it is none."""
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise ConfigError(
            f"{name}: expected a number, got {value!r}; start the ranks with torchrun or srun"
        )
    return int(value)
