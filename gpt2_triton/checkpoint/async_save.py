"""Save checkpoints while training continues: tensors are copied to host memory, and a thread writes the copy."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2_triton.checkpoint.format import list_steps
from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.console import print_line
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import CheckpointError

UNKNOWN_RATE = 1e8  # bytes per second of a slow shared disk, assumed before the first save


class AsyncCheckpointer:
    """Writes checkpoints in a thread.  If a write fails, training continues after a warning."""

    def __init__(
        self,
        directory: Path,
        retention: Retention,
        control: ControlGroup = SINGLE_PROCESS,
        resumed: dict[str, Any] | None = None,
    ):
        """`resumed` is the state that the run continues from; later checkpoints count as damaged."""
        self._directory, self._retention, self._control = directory, retention, control
        self._slowest = 0.0  # seconds of the slowest save so far
        self._host: dict[str, Tensor] = {}
        self._step: int | None = None  # of the copy on the host
        # step and state of the last save that succeeded
        self._written = (resumed["step"], resumed) if resumed else None
        self._damaged = {step for step, _ in list_steps(directory) if resumed and step > resumed["step"]}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.failed_step: int | None = None  # set by `wait`; equal on all ranks

    def save(
        self,
        step: int,
        shard: dict[str, list[Tensor]],
        state: dict[str, Any],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy this rank's shard to the host, and start a thread that calls `before`, then writes the copy.

        `shard` holds each tensor in pieces; the pieces may change once this returns.  If the last checkpoint has this
        step and state already, nothing is done.
        """
        self.wait()
        if (step, state) == self._written:
            return
        self._step, began = None, time.monotonic()
        for piece, host in self._pairs(shard):
            host.copy_(piece)
        self._step = step
        self._thread = threading.Thread(target=self._write, args=(step, state, began, before), name="checkpoint")
        self._thread.start()

    def restore_from_host(self, step: int, shard: dict[str, list[Tensor]]) -> bool:
        """Copy the last save from the host back into `shard`; return False, with nothing copied, for another step."""
        self.wait()
        if step != self._step:
            return False
        for piece, host in self._pairs(shard):
            piece.copy_(host)
        return True

    def _pairs(self, shard: dict[str, list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each flat piece with its place in host memory, allocated on first use."""
        for name, pieces in shard.items():
            if name not in self._host:
                shape = pieces[0].shape if len(pieces) == 1 else (sum(piece.numel() for piece in pieces),)
                self._host[name] = torch.empty(shape, dtype=pieces[0].dtype, pin_memory=pieces[0].is_cuda)
            start, flat = 0, self._host[name].view(-1)
            for piece in pieces:
                yield piece.view(-1), flat[start : start + piece.numel()]
                start += piece.numel()

    def expected_seconds(self, nbytes: int) -> float:
        """Return how long a save of `nbytes` may take: as long as the slowest so far, else by UNKNOWN_RATE."""
        return self._slowest or nbytes / UNKNOWN_RATE

    def _write(self, step: int, state: dict[str, Any], began: float, before: Callable[[], None]) -> None:
        self._written = None
        try:
            before()
            save_checkpoint(
                self._directory, step, self._host, state, self._retention, self._control, self._damaged - {step}
            )
            self._written = step, state
            self._damaged.discard(step)  # it is replaced
            self._slowest = max(self._slowest, time.monotonic() - began)
        except Exception as error:  # raised or reported by the thread that waits
            self._error = error

    def wait(self, raise_errors: bool = False) -> None:
        """Wait until the last checkpoint is written.  If that failed, print a warning, or raise CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        self.failed_step = self._step if error else None
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error  # a bug
        failure = f"{self._directory}: a checkpoint could not be written ({error}); make room, or make it writable"
        if raise_errors:
            raise CheckpointError(f"{failure}, and resume") from error
        if self._control.rank == 0:
            print_line(f"warning: {failure}", error=True)
