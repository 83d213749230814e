"""Save checkpoints while training continues: tensors are copied to host memory, and
a thread writes the copy.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2_triton.checkpoint.format import step_path
from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.console import print_line
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import CheckpointError

LONG_WAIT = 2.0  # seconds


class AsyncCheckpointer:
    """Writes checkpoints in a thread.  If a write fails, training continues after a warning."""

    def __init__(
        self, directory: Path, retention: Retention, control: ControlGroup = SINGLE_PROCESS
    ):
        self._directory = directory
        self._retention = retention
        self._control = control
        self._host: dict[str, Tensor] = {}
        self._step = 0  # of the last save
        # step and state of the last save that succeeded
        self._written: tuple[int, dict[str, Any]] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._has_waited = False  # longer than LONG_WAIT, for the thread
        self.failed_step: int | None = None  # set by `wait`; equal on all ranks

    def save(
        self,
        step: int,
        shard: dict[str, list[Tensor]],
        state: dict[str, Any],
        before: Callable[[], None] | None = None,
    ) -> None:
        """Copy this rank's shard, and let a thread call `before` and write it;
        nothing if this state is saved.
        """
        self.wait()
        if (step, state) == self._written:
            return
        self._step = step
        self._copy(shard)
        self._thread = threading.Thread(
            target=self._write, args=(step, state, before), name="checkpoint"
        )
        self._thread.start()

    def _copy(self, shard: dict[str, list[Tensor]]) -> None:
        """Copy each tensor to host memory, which is allocated on first use."""
        for name, pieces in shard.items():
            if name not in self._host:
                shape: tuple[int, ...] = (sum(piece.numel() for piece in pieces),)
                if len(pieces) == 1:
                    shape = pieces[0].shape
                self._host[name] = torch.empty(
                    shape, dtype=pieces[0].dtype, pin_memory=pieces[0].is_cuda
                )
            start = 0
            flat = self._host[name].view(-1)
            for piece in pieces:
                flat[start : start + piece.numel()].copy_(piece.view(-1))
                start += piece.numel()

    def _write(self, step: int, state: dict[str, Any], before: Callable[[], None] | None) -> None:
        """Write the host's copy; an error waits for `wait`."""
        self._written = None
        try:
            if before:
                before()
            path = save_checkpoint(
                self._directory, step, self._host, state, self._retention, self._control
            )
            self._written = step, state
            if self._control.rank == 0:
                print_line(f"checkpoint {path}")
        except Exception as error:  # raised or reported by the thread that waits
            self._error = error

    def wait(self, raise_errors: bool = False) -> None:
        """Wait until the last checkpoint is written.  If that failed, print a warning,
        or raise CheckpointError.
        """
        if self._thread is not None:
            began = time.monotonic()
            self._thread.join()
            self._thread = None
            if not raise_errors:  # at the end no step waits
                self._report_wait(time.monotonic() - began)
        error = self._error
        self._error = None
        self.failed_step = self._step if error else None
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error  # a bug, or a rank that has exited
        path = step_path(self._directory, self._step)
        failure = (
            f"{path} could not be written ({error}); make room, or make the directory writable"
        )
        if raise_errors:
            raise CheckpointError(f"{failure}, and resume") from error
        if self._control.rank == 0:
            print_line(f"warning: {failure}", error=True)

    def _report_wait(self, seconds: float) -> None:
        """Say once that steps wait for the disk: neither the times of steps nor the eta show it."""
        if seconds > LONG_WAIT and not self._has_waited and self._control.rank == 0:
            self._has_waited = True
            print_line(
                f"waited {seconds:.0f} s for the save of step {self._step}; "
                "if this repeats, raise checkpoint.every or take a faster disk"
            )
