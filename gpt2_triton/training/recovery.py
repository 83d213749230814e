"""When steps go wrong: what is counted, when the run stops, when it goes back.

A step is skipped, on the device, if its loss or gradient norm is not finite, or is an outlier (kernels/outlier.py).
The host learns of it one step late.  docs/stability.md has the whole.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt2_triton.checkpoint import best, checkpoint
from gpt2_triton.checkpoint.async_save import AsyncCheckpointer
from gpt2_triton.config.config import Config
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.errors import NonFiniteError
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.step import StepResult

MAX_REWINDS = 10  # to one checkpoint; what the data of so many rewinds did not cure is no matter of data

# what a checkpoint keeps of it: skipped steps in all, those of them that were outliers, how many steps in a row were
# not finite, how many had no update for either reason, and rewinds since the last checkpoint that was due
COUNTS = {"skipped": 0, "outliers": 0, "skipped_in_a_row": 0, "without_update": 0, "rewinds": 0}


class Rewind(Exception):
    """The run is to go back: raised where the step is reported, caught in the trainer's loop."""


def count(state: dict[str, Any], result: StepResult) -> None:
    """Enter a finished step into the counts."""
    state["skipped"] += not result.applied
    state["outliers"] += result.outlier
    state["skipped_in_a_row"] = 0 if result.applied or result.outlier else state["skipped_in_a_row"] + 1
    state["without_update"] = 0 if result.applied else state["without_update"] + 1


def check(state: dict[str, Any], config: Config) -> None:
    """Raise Rewind or NonFiniteError if the counts say so; `state` is that after the step."""
    train, step = config.train, state["step"]
    if train.rewind_after and state["without_update"] >= train.rewind_after and rewind_target(state, config):
        if state["rewinds"] < MAX_REWINDS:
            raise Rewind
        raise NonFiniteError(
            f"step {step}: skipped {train.rewind_after} steps in a row again, after {MAX_REWINDS} rewinds to step "
            f"{rewind_target(state, config)}; lower optim.lr, or resume from an older checkpoint"
        )
    if train.skip_limit and state["skipped_in_a_row"] >= train.skip_limit:
        raise NonFiniteError(
            f"step {step}: loss or gradient norm was not finite for {train.skip_limit} steps in a row "
            f"(samples up to {state['sample']:,}); the last update was step {step - state['without_update']}: "
            "lower optim.lr, or resume from an older checkpoint"
        )


def rewind_target(state: dict[str, Any], config: Config) -> int:
    """The step whose checkpoint a rewind takes: the last one due before the steps without an update; 0 is none.

    One that is due, and not one that a signal made: so the target is the same whether or not the run was interrupted.
    """
    every = config.checkpoint.every
    return (state["step"] - state["without_update"]) // every * every


def go_back(
    state: dict[str, Any], target: int, directory: Path, model: GPT2, saver: AsyncCheckpointer, control: ControlGroup
) -> None:
    """Give the model what it was after step `target`, delete later checkpoints, and set the step back in `state`, whose
    place in the data stays.

    The copy that the saver has in memory will do if it is of that step; otherwise the checkpoint is read, and it is a
    CheckpointError if it is not there or damaged.
    """
    if not _recall(target, model, saver, control):
        _, tensors = checkpoint.load(checkpoint.find(directory / f"step_{target:08d}"))
        model.load(tensors)
    control.all_gather(None)  # nothing is deleted while another rank looks for what is there
    control.from_rank0(lambda: checkpoint.discard_after(directory, target))
    state |= {"step": target, "skipped_in_a_row": 0, "without_update": 0, "rewinds": state["rewinds"] + 1}
    best.go_back(state, target)


def _recall(target: int, model: GPT2, saver: AsyncCheckpointer, control: ControlGroup) -> bool:
    """Each rank takes its share from its own memory, and the rest from the other ranks.  At ZeRO-0 it would have to
    take moments from them, for which there is no collective.
    """
    if control.size > 1 and model.dims["zero"] == 0 or not saver.restore_from_host(target, model.share()):
        return False
    model.link.gather()
    window = control.from_rank0(model.state.window.tolist)  # in rank 0's share alone
    model.state.window.copy_(torch.from_numpy(np.array(window, np.float32)))
    return True
