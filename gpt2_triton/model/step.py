"""Pinned host buffers of a training step in flight.

The host launches step s + 1 before it reads the results of step s, so the device always has work.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gpt2_triton.model.cuda import DeviceEvent

STEPS = 3  # a step being launched, a step being read, and the step before that, for its end time


class StepResult(NamedTuple):
    """What the host reads of a step; the loss in nats per token."""

    loss: float
    norm: float
    applied: bool  # False: the update changed nothing, as loss or norm was an outlier or not finite
    seconds: float  # from the end of the previous step to the end of this one
    z: tuple[float, float]  # z-scores of loss and norm among the last 128; 0 while there are fewer
    stop: bool = False  # a rank received a signal before this step began
    stats: Sequence[torch.Tensor] = ()  # host copies of the recorder's buffers

    @property
    def outlier(self) -> bool:
        """Return True if the step was skipped although loss and norm are finite."""
        return not self.applied and math.isfinite(self.loss) and math.isfinite(self.norm)


class InFlightStep:
    """One step's inputs and results, copied asynchronously: written again only
    after `result` has waited.
    """

    def __init__(self, device: str, io: Any, stats: Sequence[torch.Tensor] = ()):
        """`io` is kernels/step_io.py, which names the elements of the rows; `stats`
        are the recorder's buffers.
        """
        self._io = io
        empty = functools.partial(torch.empty, pin_memory=device != "cpu")
        self.stats = [empty(t.shape, dtype=t.dtype) for t in stats]
        self.step_in = empty(io.STEP_IN, dtype=torch.float32)
        self.step_key = empty(io.STEP_KEY, dtype=torch.int32)
        self.step_out = empty(io.STEP_OUT, dtype=torch.float32)
        self.z = empty(2, dtype=torch.float32)
        self.in_flight = False
        self.ended = self._began = DeviceEvent(device)

    def begin(self, previous: "InFlightStep", step_in: np.ndarray, step_key: Sequence[int]) -> None:
        """Write the inputs; the time begins when `previous` ends, or now if the device is idle."""
        assert not self.in_flight, f"a step's result() has to be read before {STEPS} more begin"
        if not previous.in_flight:
            previous.ended.record()
        self._began = previous.ended
        self.step_in.numpy()[:] = step_in
        self.step_key.numpy()[:] = step_key
        self.in_flight = True

    def result(self) -> StepResult:
        """Wait until the step has ended and return its results; to be called once."""
        assert self.in_flight, "result() of a step that was not launched or has been read"
        self.ended.wait()
        self.in_flight = False
        out = self.step_out.tolist()
        io = self._io
        z_loss, z_norm = self.z.tolist()
        return StepResult(
            loss=out[io.LOSS],
            norm=out[io.NORM],
            applied=out[io.APPLY] == 1.0,
            seconds=self.ended.seconds_since(self._began),
            z=(z_loss, z_norm),
            stop=out[io.STOPPING] > 0,
            stats=self.stats,
        )
