"""Which of several processes this is: torchrun's environment, or SLURM's as torchrun would have set it."""

import os
import re

from gpt2_triton.config import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def read_environment() -> None:
    """Give a task of srun the variables that torchrun sets; one rank on its own has none of them.

    Only a step that srun started has SLURM_STEP_ID: in the batch script itself there is one process, whatever the job.
    """
    env = os.environ
    if "RANK" in env or "SLURM_STEP_ID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    port = 20000 + int(env["SLURM_JOB_ID"]) % 20000
    values = (env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_LOCALID"])
    found = dict(zip(NAMES, (*values, first_host(env["SLURM_STEP_NODELIST"]), str(port)), strict=True))
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        found["LOCAL_WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env.update({name: value for name, value in found.items() if name not in env})


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: gpu[03-05,9],login1 is gpu03, gpu05 ... and begins with gpu03."""
    return re.sub(r"^([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?.*", r"\1\2\3", nodes)


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the environment says; (0, 1) for a process on its own."""
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE: {error}; start several ranks with torchrun or srun") from error
    missing = [name for name in NAMES if name not in os.environ]
    if size > 1 and missing:
        raise ConfigError(f"WORLD_SIZE is {size}, but {', '.join(missing)} not set; start with torchrun or srun")
    return rank, size
