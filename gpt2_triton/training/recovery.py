"""Return a model to an earlier checkpoint (a rewind), and find what was not finite in a step.

run_state.py decides when to rewind; docs/engineering/stability.md describes the whole.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from gpt2_triton.checkpoint.format import best_step, list_steps
from gpt2_triton.checkpoint.load import latest_checkpoint, open_checkpoint
from gpt2_triton.checkpoint.save import discard_after
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.distributed.watchdog import SEARCHING
from gpt2_triton.model.model import Model
from gpt2_triton.training.run import Run


def rewind_target(run: Run) -> int:
    """Return the step to which the run has to rewind, or 0."""
    state = run.state
    if not state.is_rewind_due(run.config):
        return 0
    run.wait_for_save()
    target = state.rewind_target(run.config, saved_steps(run))
    if not target and state.without_update == run.config.train.rewind_after:
        run.log.info(f"step {state.step}: no checkpoint to rewind to; steps are only skipped")
    return target


def restore_model(run: Run, target: int) -> tuple[int, tuple[int, float] | None]:
    """Load the newest intact checkpoint up to `target`, delete later ones; return its step
    and the best still there.
    """
    directory = run.run_dir / "checkpoints"
    found = run.control.from_rank0(lambda: str(latest_checkpoint(directory, target)))
    checkpoint = open_checkpoint(Path(found))
    run.model.load(checkpoint.parts(run.model.saved.needs()))
    run.control.all_gather(None)  # until every rank has loaded: later ones are deleted now
    state = checkpoint.state
    run.control.from_rank0(lambda: discard_after(directory, state["step"]))
    best = tuple(state["best"]) if best_step(state) in saved_steps(run) else None
    return state["step"], best


def saved_steps(run: Run) -> list[int]:
    """Return the steps of the run's checkpoints, as rank 0 finds them."""
    directory = run.run_dir / "checkpoints"
    return run.control.from_rank0(lambda: [step for step, _ in list_steps(directory)])


def first_non_finite(run: Run) -> str:
    """Compute the last finished step's gradients again; name the first
    tensor that is not finite.
    """
    with run.watchdog.phase(SEARCHING):
        batches = run.batches.step(_first_sample(run))
        found = find_non_finite_tensor(run.model, batches, run.control)
    return found or "nothing when computed again"


def _first_sample(run: Run) -> int:
    """Return the first global sample of the last finished step."""
    return run.state.sample - run.config.train.step_sequences


def find_non_finite_tensor(model: Model, batches: Iterable[Tensor], control: ControlGroup) -> str:
    """Compute these batches' gradients; name the first tensor that is not
    finite.  All ranks call it.
    """
    assert model.stats_recorder, "statistics have no memory: log.stats_every is 0"
    model.with_stats = True
    n = 0
    for n, packed in enumerate(batches, start=1):
        model.micro_step(packed, first=n == 1, last=False)
    return model.stats_recorder.first_non_finite(n, control)


def non_finite_losses(run: Run) -> str:
    """Compute the losses of the last finished step again; tell how many are not finite, and where
    the first is.  All ranks call it.
    """
    with run.watchdog.phase(SEARCHING):
        run.model.comm.gather_params()
        found = run.control.all_gather(_non_finite_losses_here(run))
    places = [(rank, place) for rank, (*_, place) in enumerate(found) if place]
    if not places:
        return (
            "its losses are finite when computed again, so a gradient, "
            "or an operand in fp8, was not finite"
        )
    rank, where = places[0]
    bad, rows, _ = zip(*found)
    counts = f"{sum(bad):,} of its {sum(rows):,} sequences"
    return f"the losses of {counts} are not finite, the first on rank {rank} at {where}"


def _non_finite_losses_here(run: Run) -> tuple[int, int, str]:
    """Return the sequences of this rank's losses that are not finite, all that it has in the step,
    and the place of the first bad one.
    """
    model = run.model
    loader = run.data.train
    bad = rows = 0
    place = ""
    for first in run.batches.first_samples_of_step(_first_sample(run)):
        tokens = loader.batch(first, model.B)
        ids = tokens[:, :-1].copy()
        targets = tokens[:, 1:].copy()
        losses = model.evaluate(ids, targets, fp8=model.has_fp8).numpy().reshape(model.B, -1)
        wrong = ~np.isfinite(losses).all(axis=1)
        if not place and wrong.any():
            place = loader.place(first + int(wrong.argmax()))
        bad += int(wrong.sum())
        rows += model.B
    return bad, rows, place
