"""Layout of a run's checkpoints on disk.

    RUN/checkpoints/step_NNNNNNNN/
        rank_00000.safetensors ...   a rank's shard of every tensor; rank 0 also holds the
                                     unsharded tensors
        state.json                   configuration, counters, best validation loss, and the
                                     spans of several ranks
        manifest.json                size and sha256 of every other file
        tokenizer.json ...           of a tokenizer that state.json names by its hash

A span is [flat index, length] of a piece of a shard.  state.json lists each rank's spans in
the order of the rank's file, so any number of ranks reads the checkpoint.  Muon shards the
tensor v differently: `second_shares` lists its spans.  File names follow the rules below and
are never taken from a file's text.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_triton.errors import CheckpointError
from gpt2_triton.files import FileError, read_json, sha256

FORMAT = 2  # 1 had no window of losses and norms
SHARES, SECOND_SHARES = "shares", "second_shares"  # keys of the state with a value per rank
STATE = "state.json"
MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step_([0-9]{8,})")
Spans = list[list[int]]  # [flat index, length] of each piece of a shard


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; CheckpointError if there is another thing."""
    try:
        return read_json(path)
    except FileError as error:
        raise CheckpointError(str(error)) from None


def step_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` in a run's `checkpoints` directory."""
    return directory / f"step_{step:08d}"


def tensors_name(rank: int) -> str:
    """Return the name of a rank's file of tensors in a step directory."""
    return f"rank_{rank:05d}.safetensors"


def list_steps(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of everything in `directory` that is named as a
    checkpoint, oldest first.
    """
    if not directory.is_dir():
        return []
    names = os.listdir(directory)
    return sorted(
        (int(match[1]), directory / name) for name in names if (match := STEP_NAME.fullmatch(name))
    )


def best_step(state: dict[str, Any]) -> int | None:
    """Return the step of the lowest validation loss; None if the run keeps none, or none yet."""
    return state["best"][0] if state.get("best") else None


def fingerprint(path: Path, advance: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Return a file's entry in the manifest: its size and sha256;
    `advance` is told the bytes read.
    """
    return {"bytes": path.stat().st_size, "sha256": sha256(path, advance)}
