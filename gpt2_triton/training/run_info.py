"""RUN/run.json: the run's id at Weights & Biases; code, packages, device, table, memory plan, schedule of each start.

    {"wandb_id": "1a2b3c4d", "starts": [{"time": ..., "after_step": 0, "git": {"commit": ..., "dirty": false}, ...}]}
Each start of the run adds an entry, which shows whether it was resumed under another commit or on another GPU.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.files import read_regular, write_atomic
from gpt2_triton.kernels import table_file
from gpt2_triton.version import code_state, package_versions

RUN = "run.json"
MOST_BYTES = 1 << 24  # of run.json, which grows by about 1 KB with each start


def describe_start(
    config: Config, shape: StepShape, arena_bytes: int, device: str, after_step: int, calibrated: bool = False
) -> dict[str, Any]:
    """Return the entry of a start; `config` has the recompute level that was chosen, `device` is the GPU's name.

    calibrated   whether the start finds new scales for the tensors in fp8
    """
    o, tokens = config.optim, config.total_batch_tokens
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
        "precision": {"products": config.train.precision, "keep_bf16": config.fp8.keep_bf16, "calibrated": calibrated},
        "plan": {"arena_bytes": arena_bytes, "recompute": config.memory.recompute, "parameters": config.n_params},
        "schedule": {
            "steps": config.train.steps,
            "tokens": config.train.steps * tokens,
            "tokens_per_step": tokens,
            "micro_batch": shape.micro_batch,
            "accumulation": shape.accumulation,
            "learning_rate": o.schedule,
            "peak_lr": o.lr,
            "warmup": o.warmup,
            "final_lr": o.lr if o.schedule == "constant" else o.lr * o.final_frac,
        },
    }


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return run.json, with a list of dictionaries as "starts"; an empty dictionary if there is none or it is
    damaged.  OSError if it cannot be read.
    """
    try:
        found = json.loads(read_regular(run_dir / RUN, MOST_BYTES))
        json.dumps(found, indent=1)  # RecursionError here, and not when it is written again
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    starts, run_id = found.get("starts"), found.get("wandb_id")
    return {
        "wandb_id": run_id if isinstance(run_id, str) else None,
        "starts": [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else [],
    }


def write_run(run_dir: Path, wandb_id: str | None, starts: list[dict[str, Any]]) -> None:
    write_atomic(run_dir / RUN, (json.dumps({"wandb_id": wandb_id, "starts": starts}, indent=1) + "\n").encode())
