"""Checkpoints written while the run goes on: its tensors are copied to the host, and a thread writes the copy."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gpt2_triton.checkpoint.save import save_checkpoint
from gpt2_triton.console import print_line
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import CheckpointError


class AsyncCheckpointer:
    """Writes checkpoints in a thread.  If one cannot be written, the run goes on, with a warning."""

    def __init__(self, directory: Path, keep: int, major: int, back: int = 0, control: ControlGroup = SINGLE_PROCESS):
        self._directory, self._keep, self._major, self._back, self._control = directory, keep, major, back, control
        self._host: dict[str, Tensor] = {}
        self._step: int | None = None  # of what the host holds
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, step: int, share: dict[str, list[Tensor]], state: dict[str, Any]) -> None:
        """Start writing what checkpoint.save takes, each tensor joined from the parts in `share`, which are copied
        before this returns.
        """
        self.wait()
        self._step = None
        for part, host in self._pairs(share):
            host.copy_(part)
        self._step = step
        self._thread = threading.Thread(target=self._save, args=(step, state), name="checkpoint")
        self._thread.start()

    def restore_from_host(self, step: int, share: dict[str, list[Tensor]]) -> bool:
        """Copy what was submitted last back into `share`; False, and nothing is done, if that was not of this step."""
        self.wait()
        if step != self._step:
            return False
        for part, host in self._pairs(share):
            part.copy_(host)
        return True

    def _pairs(self, share: dict[str, list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Every part, flat, and its place on the host."""
        for name, parts in share.items():
            if name not in self._host:
                shape = parts[0].shape if len(parts) == 1 else (sum(part.numel() for part in parts),)
                self._host[name] = torch.empty(shape, dtype=parts[0].dtype, pin_memory=parts[0].is_cuda)
            at, flat = 0, self._host[name].view(-1)
            for part in parts:
                yield part.view(-1), flat[at : at + part.numel()]
                at += part.numel()

    def _save(self, step: int, state: dict[str, Any]) -> None:
        try:
            control = self._control
            save_checkpoint(self._directory, step, self._host, state, self._keep, self._major, self._back, control)
        except Exception as error:  # whatever it is, it belongs to the thread that waits
            self._error = error

    def wait(self, raise_errors: bool = False) -> None:
        """Until the submitted checkpoint is written.  If it cannot be: a warning, or CheckpointError on request."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, (OSError, SafetensorError)):
            raise error  # our own slip
        # by its text: safetensors and the other ranks give no number
        full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
        older = "; older ones stay" if any(self._directory.glob("step_*")) else ""
        todo = "free some space" if full else "make it writable"
        failure = f"{self._directory}: a checkpoint could not be written ({error}){older}; {todo}"
        if raise_errors:
            raise CheckpointError(f"{failure} and resume") from error
        if self._control.rank == 0:
            print_line(f"warning: {failure}", error=True)
