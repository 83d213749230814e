"""Steps between launch and result: the device computes a step while the
host reads the step before.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from gpt2_triton.distributed.watchdog import Watchdog
from gpt2_triton.model.model import Model
from gpt2_triton.model.step import InFlightStep, StepResult


class StepQueue:
    """Launches steps and returns their results in order.  At most two are in flight."""

    def __init__(self, model: Model, watchdog: Watchdog):
        self._model = model
        self._watchdog = watchdog
        self._in_flight: deque[InFlightStep] = deque()

    def launch(
        self, step: int, inputs: np.ndarray, batches: Iterator[Tensor], with_stats: bool
    ) -> None:
        """Launch a step over micro-batches of `batches`; `inputs` is the row of step_inputs."""
        accumulation = self._model.shape.accumulation
        self._model.begin_step(inputs, step, self._model.config.train.seed, with_stats)
        for micro in range(accumulation):
            packed = next(batches)
            self._watchdog.heartbeat(step + 1)
            self._model.micro_step(packed, first=micro == 0, last=micro == accumulation - 1)
        self._in_flight.append(self._model.end_step())

    def finish(self, running: int = 0) -> StepResult | None:
        """Wait for the oldest step in flight and return its result; None if at most
        `running` steps are in flight.
        """
        if len(self._in_flight) <= running:
            return None
        return self._in_flight.popleft().result()
