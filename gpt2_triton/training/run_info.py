"""RUN/run.json: the run's id at Weights & Biases and its place, and each start's
code, packages, device and plan.

    {"wandb_id": "1a2b3c4d", "place": ["/data/RUN", 1234567],
     "starts": [{"time": ..., "after_step": 0, "git": {"commit": ...}, ...}]}
Each start of the run adds an entry.  The entries show whether the commit or the GPU has changed.
"""

import sys
import time
from pathlib import Path
from typing import Any

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.files import object_in, write_json
from gpt2_triton.kernels import table_file
from gpt2_triton.training.metrics import RUN
from gpt2_triton.version import code_state, package_versions


def describe_start(
    config: Config,
    shape: StepShape,
    arena_bytes: int,
    device: str,
    after_step: int,
    calibrated: bool = False,
) -> dict[str, Any]:
    """Return the entry of a start; `device` is the GPU's name, `calibrated` whether this
    start finds fp8's scales.
    """
    products = "fp32" if config.train.dtype == "fp32" else config.train.precision
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "after_step": after_step,
        "command": sys.argv,
        "git": code_state(),
        "packages": package_versions(),
        "device": device,
        "table": table_file.about(),
        "gpus": shape.gpus,
        "zero": shape.zero,
        "precision": {
            "products": products,
            "keep_bf16": config.fp8.keep_bf16,
            "calibrated": calibrated,
        },
        "plan": {
            "arena_bytes": arena_bytes,
            "recompute": config.memory.recompute,
            "parameters": config.n_params,
        },
    }


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return run.json, of a copy without the id; {} if it is missing or no object."""
    found = object_in(run_dir / RUN)
    here = _place(run_dir)
    there = found.get("place", here)  # older runs have none
    is_copy = here[0] != there[0] and here[1] != there[1]
    return found | {"wandb_id": None} if is_copy else found


def write_run(run_dir: Path, wandb_id: str | None, starts: list[dict[str, Any]]) -> None:
    """Write run.json with all starts, the last one included."""
    write_json(run_dir / RUN, {"wandb_id": wandb_id, "place": _place(run_dir), "starts": starts})


def _place(run_dir: Path) -> list[Any]:
    """Return path and inode: a moved or remounted directory keeps its inode, a copy has neither."""
    return [str(run_dir.resolve()), run_dir.stat().st_ino]
