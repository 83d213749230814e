"""Memory that the ranks of one host share, and a barrier in stream order for these ranks.

Ranks open a GPU's memory by CUDA's IPC handles; copy engines read it over NVLink or PCIe.  They
open a CPU's memory by a file descriptor.  Only this file uses private or undocumented names of
torch; they are tested with torch 2.11.  If torch lacks such a name, or the GPUs are AMD's, ranks
exchange through collectives.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt2_triton.distributed.control import ControlGroup


def allocate(nbytes: int, device: str, control: ControlGroup) -> tuple[Tensor, list[Tensor], str]:
    """Allocate on each rank of a host together; return own memory, all
    ranks', and why these are none.
    """
    buffer = SharedBuffer(nbytes, device)
    own = control.rank
    given = [None if rank == own else buffer.handle() for rank in range(control.size)]
    handles = [row[own] for row in control.all_gather(given)]
    opened = list[Tensor]()
    reason = ""
    try:
        for rank, handle in enumerate(handles):
            is_own = rank == own
            opened.append(buffer.memory if is_own else open_shared(handle, nbytes, device))
    except (AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    reasons = [text for text in control.all_gather(reason) if text]
    buffer.close_handle()
    if reasons:
        return buffer.memory, [], reasons[0]
    return buffer.memory, opened, ""


class SharedBuffer:
    """Memory of this process that others can open."""

    def __init__(self, nbytes: int, device: str):
        self._file: int | None = None
        if device == "cuda":
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self._file = os.memfd_create("gpt2_triton")
            # missing memory is an error here, not in a step
            os.posix_fallocate(self._file, 0, nbytes)
            self.memory = _map(self._path, nbytes)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def handle(self) -> list[Any] | None:
        """Return what one reader gives to `open_shared`, as JSON; None if
        this memory cannot be shared.
        """
        if self._file is not None:
            return [self._path]
        if torch.version.hip:  # AMD's handles: not tried
            return None
        try:
            parts = self.memory.untyped_storage()._share_cuda_()
        except (AttributeError, RuntimeError):
            return None
        return [part.hex() if isinstance(part, bytes) else part for part in parts]

    def close_handle(self) -> None:
        """Refuse further readers; earlier readers keep the memory."""
        if self._file is not None:
            os.close(self._file)


def open_shared(handle: list[Any] | None, nbytes: int, device: str) -> Tensor:
    """Return another process's SharedBuffer as bytes; raise RuntimeError if
    this process cannot read it.
    """
    if handle is None:
        raise RuntimeError("the driver or torch does not share it")
    if device == "cpu":
        return _map(handle[0], nbytes)
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
    # on this device: opened on the owner's device, the memory would be
    # copied in the owner's streams
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *parts[1:])
    memory = torch.empty(0, dtype=torch.uint8, device=device)
    return memory.set_(storage, 0, (nbytes,))  # type: ignore[call-overload]


def _map(path: str, nbytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


class StreamBarrier:
    """An all-gather of a few bytes by NCCL's copy engines.

    Ranks wait for each other in the stream.  A kernel that waits would keep a multiprocessor busy.
    The default stream is not allowed: there NCCL's copy engines refuse to work.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta):
        gpu = torch.device("cuda", torch.cuda.current_device())
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # with more CTAs NCCL allocates 0.2 GiB of buffers
        options.config.max_ctas = options.config.min_ctas = 1
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        self.group: Any = dist.new_group(timeout=timeout, pg_options=options, device_id=gpu)
        self._backend = self.group._get_backend(gpu)
        self._pool: Any = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.whole = torch.empty(4 * size, dtype=torch.int32, device=gpu)
        self.part = self.whole[4 * rank :][:4]
        self._backend.register_mem_pool(self._pool, symm=True)

    def close(self) -> None:
        """Release the memory: NCCL's memory does not outlive the process group."""
        self._backend.deregister_mem_pool(self._pool)
        del self.whole, self.part, self._pool, self._backend, self.group
