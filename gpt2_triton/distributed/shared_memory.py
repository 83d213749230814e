"""Memory that the processes of one host open to each other: a GPU's through CUDA's IPC handles, which the others' copy
engines read over NVLink or PCIe; on a CPU memory that has a file descriptor.
"""

import os
from typing import Any

import torch
from torch import Tensor


class Window:
    """Memory of this process that others can open."""

    def __init__(self, nbytes: int, device: str):
        self._file: int | None = None
        if device == "cuda":
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self._file = os.memfd_create("gpt2_triton")
            os.posix_fallocate(self._file, 0, nbytes)  # what there is no room for fails here and not in a step
            self.memory = _mapped(self._path, nbytes)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def handle(self) -> list[Any] | None:
        """What one other process's `opened` takes, as JSON; None if this memory cannot be shared.  Each needs its own:
        torch keeps a count in it, which the one reader takes from 1 to 0.
        """
        if self._file is not None:
            return [self._path]
        try:
            parts = self.memory.untyped_storage()._share_cuda_()
        except RuntimeError:
            return None
        return [part.hex() if isinstance(part, bytes) else part for part in parts]

    def settle(self) -> None:
        """Nobody will open it any more; those who have keep it."""
        if self._file is not None:
            os.close(self._file)


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
