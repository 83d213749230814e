"""Return a model to an earlier checkpoint (a rewind), and find what was not finite in a step.  This search, and
the calibration of fp8, read a step's data again.

run_state.py decides when to rewind; docs/engineering/stability.md describes the whole.
"""

from pathlib import Path

from torch import Tensor

from gpt2_triton.checkpoint.format import best_step, list_steps, step_path
from gpt2_triton.checkpoint.load import latest_checkpoint, load_checkpoint
from gpt2_triton.checkpoint.save import discard_after
from gpt2_triton.data.loader import Prefetcher
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.errors import CheckpointError, DataError
from gpt2_triton.model.model import Model


def restore_model(
    target: int, run_dir: Path, model: Model, control: ControlGroup
) -> tuple[int, tuple[int, float] | None]:
    """Load the newest intact checkpoint up to `target`, delete later ones; return its step and the best still there."""
    directory = run_dir / "checkpoints"
    reached = control.from_rank0(lambda: _newest_intact(directory, target))
    state, tensors = load_checkpoint(step_path(directory, reached))
    model.load(tensors)
    control.all_gather(None)  # wait until every rank has loaded: later checkpoints are deleted now
    control.from_rank0(lambda: discard_after(directory, reached))
    steps = saved_steps(run_dir, control)
    return reached, (tuple(state["best"]) if best_step(state) in steps else None)


def _newest_intact(directory: Path, target: int) -> int:
    """Return the step of the newest intact checkpoint up to `target`."""
    found = latest_checkpoint(directory, target)
    if found is None:
        raise CheckpointError(f"{directory}: step {target}, to which the run rewinds, was deleted; use --resume")
    return int(found.name.removeprefix("step_"))


def saved_steps(run_dir: Path, control: ControlGroup) -> list[int]:
    """Return the steps of the run's checkpoints, as rank 0 finds them."""
    return control.from_rank0(lambda: [step for step, _ in list_steps(run_dir / "checkpoints")])


def batches_of_step(batches: Prefetcher, first_sample: int, control: ControlGroup) -> list[Tensor]:
    """Return this rank's batches of the step from this sample; all ranks call it, and raise DataError alike."""
    found, unread = [], ""
    try:
        found = list(batches.step(first_sample))
    except DataError as error:
        unread = str(error)
    if messages := [message for message in control.all_gather(unread) if message]:
        raise DataError(messages[0])
    return found


def first_non_finite(model: Model, batches: Prefetcher, first_sample: int, control: ControlGroup) -> str:
    """Compute a step's gradients again; name the first tensor that is not finite.  All ranks call it."""
    try:
        micro_batches = batches_of_step(batches, first_sample, control)
    except DataError as error:  # not raised: the next step may be in flight, and needs all ranks
        return f"unknown, as its data cannot be read again ({error})"
    return model.first_non_finite(micro_batches, control) or "nothing when computed again"
