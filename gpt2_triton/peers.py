"""Memory that the processes of one host open to each other: a GPU's through CUDA's IPC handles, which the others' copy
engines read over NVLink; on a CPU a file that all map.
"""

import os
import tempfile
from typing import Any

import torch
from torch import Tensor


class Window:
    """Memory of this process that others can open."""

    def __init__(self, nbytes: int, device: str):
        self._path = ""
        if device == "cuda":
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            file, self._path = tempfile.mkstemp(prefix="gpt2_triton_")
            os.posix_fallocate(file, 0, nbytes)  # a disk that is full says so here and not in the middle of a step
            os.close(file)
            self.memory = _mapped(self._path, nbytes)

    def handle(self) -> list[Any] | None:
        """What `opened` takes, as JSON; None if this memory cannot be shared."""
        if self._path:
            return [self._path]
        try:
            parts = self.memory.untyped_storage()._share_cuda_()
        except RuntimeError:
            return None
        return [part.hex() if isinstance(part, bytes) else part for part in parts]

    def forget(self) -> None:
        """Nobody will open it any more."""
        if self._path:
            os.unlink(self._path)


def opened(handle: list[Any] | None, nbytes: int, device: str) -> Tensor:
    """Another process's Window; RuntimeError if it cannot be read from here."""
    if handle is None:
        raise RuntimeError("CUDA does not share it")
    if device == "cpu":
        return _mapped(handle[0], nbytes)
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
    # as memory of this device, whose streams then copy it, and not as that of the other one, which has streams too
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *parts[1:])
    memory = torch.empty(0, dtype=torch.uint8, device=device)
    return memory.set_(storage, 0, (nbytes,))  # type: ignore[call-overload]


def _mapped(path: str, nbytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
