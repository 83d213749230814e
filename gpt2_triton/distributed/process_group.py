"""The process group: several processes as one run, the collectives of a step, and memory that the ranks of one host
share.

NCCL carries device tensors, gloo those of a run on the CPU.  What hosts tell each other goes through the key-value
store that started the group (control.py).
"""

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpt2_triton.console import print_line
from gpt2_triton.distributed.control import ControlGroup, agree_on_session
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.distributed.shared_memory import Window, opened
from gpt2_triton.errors import PeerLostError


class ProcessGroup:
    """The ranks of a run.  One rank alone is a ProcessGroup too, which agrees with itself at once."""

    def __init__(self, device: str, timeout: float):
        """Choose this rank's GPU and join the group; device is "cuda" or "cpu", timeout that of watchdog.py, in
        seconds, which sees more and speaks first: joining may take three times, a collective twelve times as long.
        """
        self.rank, self.size = rank_and_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # among the ranks of this host
        self.device = device
        self.store: Any = None
        self.single_node = os.environ.get("LOCAL_WORLD_SIZE") == str(self.size)  # so says the launcher
        self._allocations = 0
        self._flags: Tensor | None = None  # what ranks on GPUs meet over, of memory that _register makes
        self._meeting: Any = None  # their group for that
        self._pool: Any = None
        if device == "cuda":
            # SLURM may make only one GPU visible to each process
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
        if self.size == 1:
            return
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast sums in an order that NCCL does not promise
        limit = timedelta(seconds=3 * timeout)
        self._limit = 4 * limit
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
            name = agree_on_session(store, self.rank, self.size, 3 * timeout)
            self.store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).splitlines()[0]
            todo = "start all of them, with a MASTER_PORT that nothing else uses"
            raise PeerLostError(f"the {self.size} ranks did not come together ({reason}); {todo}") from error
        gpu = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=self._limit,
            device_id=gpu,
        )

    # ---- memory ----

    def allocate_shared(self, nbytes: int) -> tuple[Tensor, list[Tensor]]:
        """So many bytes on every rank, all of which call it together; and all ranks' by rank, as this one sees them, if
        they are on one host and can read each other's memory.
        """
        if self.size == 1 or not self.single_node:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device), []
        self._allocations += 1
        control, window = self.control(f"memory {self._allocations}"), Window(nbytes, self.device)
        given = control.all_gather([None if rank == self.rank else window.handle() for rank in range(self.size)])
        handles, reason, seen = [handles[self.rank] for handles in given], "", list[Tensor]()
        try:
            seen = [window.memory if r == self.rank else opened(h, nbytes, self.device) for r, h in enumerate(handles)]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        reasons = [text for text in control.all_gather(reason) if text]
        window.settle()
        if reasons:
            if self.rank == 0:
                what = f"the ranks of this host cannot read each other's memory ({reasons[0]})"
                print_line(
                    f"warning: {what}: they exchange gradients and parameters through collectives, slower", error=True
                )
            return window.memory, []
        if self.device == "cuda" and self._flags is None:
            self._flags = self._register()
        return window.memory, seen

    def _register(self) -> Tensor:
        """A few bytes of each rank that NCCL's copy engines gather.  Ranks that meet in this all-gather wait in the
        stream, where a kernel would wait on a multiprocessor.
        """
        gpu, options = torch.device("cuda", torch.cuda.current_device()), dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = options.config.min_ctas = 1  # for more, NCCL would have 0.2 GiB of buffers
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        self._meeting = dist.new_group(timeout=self._limit, pg_options=options, device_id=gpu)
        backend = self._meeting._get_backend(gpu)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            flags = torch.empty(4 * self.size, dtype=torch.int32, device=gpu)
        backend.register_mem_pool(self._pool, symm=True)
        return flags

    # ---- collectives, in the order of the current stream ----

    def all_reduce(self, tensor: Tensor) -> None:
        """tensor = the sum over ranks, on every rank the same bits."""
        self._collective(dist.all_reduce, tensor)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        """out = this rank's part of the sum of `whole` over ranks; it may be that part of `whole`."""
        self._collective(_named("reduce_scatter_single", "reduce_scatter_tensor"), out, whole)

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """whole = the ranks' parts one behind the other; `part` may be this rank's place in it."""
        self._all_gather(whole, part, None)

    def barrier(self) -> None:
        """What ranks wrote before it others may read after it, and what they read others may write.  On a GPU for ranks
        that have allocated memory together, and not in the default stream, where NCCL's copy engines refuse to work.
        """
        if self._flags is None:
            self._collective(dist.barrier)
        else:
            self._all_gather(self._flags, self._flags[4 * self.rank :][:4], self._meeting)

    def _all_gather(self, whole: Tensor, part: Tensor, group: Any) -> None:
        self._collective(_named("all_gather_single", "all_gather_into_tensor"), whole, part, group=group)

    def _collective(self, function: Callable[..., Any], *tensors: Tensor, group: Any = None) -> None:
        try:
            function(*tensors, group=group)
        except RuntimeError as error:
            reason = re.sub(r"^\[\S+:\d+\] |\. .*", "", str(error).splitlines()[0])  # first sentence, no line of C++
            what = f"lost the other ranks in {function.__name__} ({reason})"
            raise PeerLostError(f"{what}; one has ended: its message, or the launcher's, says why") from error

    # ---- words between hosts ----

    def control(self, name: str) -> ControlGroup:
        """A conversation of all ranks; threads that talk at the same time need one each."""
        return ControlGroup(name, self.rank, self.size, self.store)

    def close(self) -> None:
        """Wait for the other ranks and leave the group: without both, ranks that end first break those behind."""
        if self.size > 1:
            dist.barrier()
            if self._flags is not None:
                self._meeting._get_backend(self._flags.device).deregister_mem_pool(self._pool)
                self._flags = self._pool = None  # memory of NCCL's, which does not outlive the group
            dist.destroy_process_group()


def _named(new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 renamed two collectives and warns about the names that 2.11 has."""
    return getattr(dist, new, None) or getattr(dist, old)
