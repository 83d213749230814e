"""The progress of a run: the numbers that a checkpoint keeps next to the tensors.

The device skips a step if its loss or gradient norm is not finite (clip_factor in
kernels/reduce.py) or is an outlier (kernels/outlier.py).  The host learns this one step later and
counts it here.  docs/engineering/stability.md describes the whole.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gpt2_triton.config.config import Config
from gpt2_triton.errors import NonFiniteError
from gpt2_triton.model.step import StepResult

ADVICE = (
    "lower optim.lr and resume; if that does not help, delete the newest "
    "checkpoints and resume, or start again"
)
MAX_REWINDS = 10  # to one checkpoint; after so many, other data does not help


@dataclass
class RunState:
    """The state after `step` finished steps; the fields are state.json's keys,
    without an empty `left_out`.
    """

    step: int = 0
    sample: int = 0  # the next global sample; after a rewind it is ahead of the step
    # (step, loss) of the lowest validation loss; None if not recorded
    best: tuple[int, float] | None = None
    waited: int = 0  # validations since the best
    skipped: int = 0  # skipped steps
    outliers: int = 0  # skipped steps with finite numbers
    skipped_in_a_row: int = 0  # steps skipped as not finite since the last update or outlier
    without_update: int = 0  # steps skipped since the last update, as not finite or outliers
    rewinds: int = 0  # consecutive rewinds to rewound_to
    rewound_to: int = 0  # the target of the last rewind
    # keys of tasks that were due after `step` when the run stopped
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._earlier_bests: list[tuple[int, float]] = []  # found by this start, oldest first

    @classmethod
    def from_checkpoint(cls, saved: dict[str, Any]) -> "RunState":
        """Return the state from a state.json; ignore other keys."""
        own = {f.name: saved[f.name] for f in fields(cls) if f.name in saved}
        if own.get("best"):  # older checkpoints have none
            own["best"] = tuple(own["best"])
        return cls(**own)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as state.json has them."""
        return {key: value for key, value in asdict(self).items() if key != "left_out" or value}

    # ---- the lowest validation loss ----

    def record_validation(self, step: int, loss: float) -> None:
        """Record a validation loss, and whether it is the lowest so far.
        Step 0 and NaN do not count.
        """
        self.waited += 1
        lowest = self.best[1] if self.best else math.inf
        if step > 0 and loss < lowest:
            if self.best:
                self._earlier_bests.append(self.best)
            self.best = step, loss
            self.waited = 0

    @property
    def best_step(self) -> int | None:
        """The step of the lowest validation loss so far."""
        return self.best[0] if self.best else None

    def is_out_of_patience(self, config: Config) -> bool:
        """Return True if train.patience validations in a row had no lower loss."""
        return self.best is not None and 0 < config.train.patience <= self.waited

    def forget_best_of(self, step: int | None) -> None:
        """Forget the validation loss of `step`, which could not be saved; the
        best before it is best again.
        """
        self._earlier_bests = [best for best in self._earlier_bests if best[0] != step]
        if step is not None and self.best_step == step:
            self.best = self._earlier_bests.pop() if self._earlier_bests else None

    # ---- skipped steps and rewinds ----

    def count(self, result: StepResult) -> None:
        """Count a finished step as applied or skipped."""
        self.skipped += not result.applied
        self.outliers += result.outlier
        self.skipped_in_a_row = 0 if result.applied or result.outlier else self.skipped_in_a_row + 1
        self.without_update = 0 if result.applied else self.without_update + 1

    def is_rewind_due(self, config: Config) -> bool:
        """Return True if at least train.rewind_after steps in a row had no update."""
        return 0 < config.train.rewind_after <= self.without_update

    def rewind_target(self, config: Config, saved: Collection[int]) -> int:
        """Return the step to which a due rewind returns, or 0; `saved`:
        the steps of the checkpoints.

        The target is the newest checkpoint up to the last multiple of checkpoint.every
        with an update.  A later one, which a signal caused, is no target, so that
        interruptions do not change a run.
        """
        every = config.checkpoint.every
        updated = self.step - self.without_update
        return max((step for step in saved if step <= updated // every * every), default=0)

    def raise_if_unstable(
        self, config: Config, target: int, find_losses: Callable[[], str]
    ) -> None:
        """Raise NonFiniteError if rewinds to `target` did not help, or after
        train.skip_limit non-finite steps.
        """
        train = config.train
        if target and target == self.rewound_to and self.rewinds >= MAX_REWINDS:
            raise NonFiniteError(
                f"step {self.step}: skipped {train.rewind_after} steps in a row "
                f"again, after {MAX_REWINDS} rewinds to "
                f"step {target}; {ADVICE}"
            )
        if not target and 0 < train.skip_limit <= self.skipped_in_a_row:
            rewind = ", with no checkpoint to rewind to" if train.rewind_after else ""
            raise NonFiniteError(
                f"step {self.step}: loss or gradient norm was not finite for "
                f"{train.skip_limit} steps in a row"
                f"{rewind} (samples up to {self.sample:,}); in the last step, {find_losses()}; "
                f"the last update was step {self.step - self.without_update}: {ADVICE}"
            )

    def rewind_to(self, step: int, best: tuple[int, float] | None) -> None:
        """Set the step back, but not the position in the data; `best` is the lowest
        validation loss up to it.
        """
        self.step = step
        self.waited = 0
        self.skipped_in_a_row = 0
        self.without_update = 0
        self.rewinds = self.rewinds + 1 if step == self.rewound_to else 1
        self.rewound_to = step
        self.best = best
        self._earlier_bests = []
