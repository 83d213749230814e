"""The process group: rendezvous, the collectives of a step, and memory
shared by the ranks of one host.

NCCL carries tensors of GPUs, gloo tensors of CPUs.  Other values go through the key-value store of
the rendezvous (control.py).
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
from gpt2_triton.device import local_gpu
from gpt2_triton.distributed import shared_memory
from gpt2_triton.distributed.control import ControlGroup, agree_on_session
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.errors import PeerLostError


def connect(rank: int, size: int, seconds: float) -> Any:
    """Return this start's key-value store; PeerLostError unless all ranks join within `seconds`."""
    try:
        limit = timedelta(seconds=seconds)
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
        session = agree_on_session(store, rank, size, seconds)
        return dist.PrefixStore(session, store)  # type: ignore[attr-defined]
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).splitlines()[0]
        raise PeerLostError(
            f"rendezvous of {size} ranks failed ({reason}); "
            "start all of them, with a MASTER_PORT that nothing else uses"
        ) from error


class ProcessGroup:
    """The ranks of a run.  With a single rank every method returns at once."""

    def __init__(self, device: str, timeout: float):
        """Select this rank's GPU and join the group; `timeout` is the watchdog's, in seconds."""
        self.rank, self.size = rank_and_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = device
        self.store: Any = None
        self.single_node = os.environ.get("LOCAL_WORLD_SIZE") == str(self.size)
        # the watchdog reports first: it names the rank at fault
        self._timeout = timedelta(seconds=12 * timeout)
        self._own: Any = None  # our group beside the program's; None: ours is the default group
        self._allocations = 0
        # for GPUs that share memory
        self._stream_barrier: shared_memory.StreamBarrier | None = None
        if device == "cuda":
            torch.cuda.set_device(local_gpu())
        self._turns = ControlGroup("turns")
        if self.size == 1:
            return
        # NCCL promises no fixed order of multicast sums
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        self.store = connect(self.rank, self.size, 3 * timeout)
        self._turns = self.control("turns")
        gpu = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
        kind: dict[str, Any] = dict(
            backend="nccl" if gpu else "gloo", timeout=self._timeout, device_id=gpu
        )
        if dist.is_initialized():  # by the program that trains by a call
            self._own = dist.new_group(**kind)
        else:
            dist.init_process_group(store=self.store, rank=self.rank, world_size=self.size, **kind)

    def allocate_shared(self, nbytes: int) -> tuple[Tensor, list[Tensor]]:
        """Allocate on each rank together; return own memory, and all ranks' if
        they can read each other's.
        """
        if self.size == 1 or not self.single_node:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device), []
        self._allocations += 1
        own, arenas, reason = shared_memory.allocate(
            nbytes, self.device, self.control(f"memory {self._allocations}")
        )
        if arenas and self.device == "cuda" and self._stream_barrier is None:
            try:
                self._stream_barrier = shared_memory.StreamBarrier(
                    self.rank, self.size, self._timeout
                )
            except AttributeError as error:  # this torch lacks a name, on every rank
                arenas = []
                reason = str(error)
        if reason and self.rank == 0:
            print_line(
                f"warning: the ranks of this host cannot read each other's memory ({reason}); "
                "gradients and parameters go through slower collectives",
                error=True,
            )
        return own, arenas

    def first_on_host(self, function: Callable[[], Any]) -> Any:
        """Return function(), which one rank of each host calls before the other ranks call it."""
        first = self.local_rank == 0
        result = function() if first else None
        self._turns.all_gather(None)
        return result if first else function()

    # ---- collectives, in the order of the current stream ----

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        """tensor = its sum over ranks, or its elementwise maximum if `largest`;
        all ranks get the same bits.
        """
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        self._collective(dist.all_reduce, tensor, op=op)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        """out = this rank's shard of the sum of `whole` over ranks; `out` may lie
        in `whole`, at that shard.
        """
        function = _collective_by_name("reduce_scatter_single", "reduce_scatter_tensor")
        self._collective(function, out, whole)

    def all_gather(self, whole: Tensor, part: Tensor, group: Any = None) -> None:
        """whole = the ranks' parts, by rank; `part` may be this rank's part of `whole`."""
        function = _collective_by_name("all_gather_single", "all_gather_into_tensor")
        self._collective(function, whole, part, group=group)

    def barrier(self) -> None:
        """Barrier in stream order.  On GPUs the ranks share memory, outside the default
        stream: see StreamBarrier.
        """
        b = self._stream_barrier
        if b is None:
            self._collective(dist.barrier)
        else:
            self.all_gather(b.whole, b.part, b.group)

    def _collective(
        self, function: Callable[..., Any], *tensors: Tensor, group: Any = None, **options: Any
    ) -> None:
        """Run a collective among our ranks; PeerLostError if one has gone."""
        try:
            function(*tensors, group=group or self._own, **options)
        except RuntimeError as error:
            # a sentence, no C++ location
            reason = re.sub(r"^\[\S+:\d+\] |\. .*", "", str(error).splitlines()[0])
            raise PeerLostError(
                f"{function.__name__} failed ({reason}): another rank has exited; "
                "see its log, or the launcher's"
            ) from error

    def control(self, name: str) -> ControlGroup:
        """Return a control group of all ranks.  Each thread needs a
        group with a name of its own.
        """
        return ControlGroup(name, self.rank, self.size, self.store)

    def close(self) -> None:
        """Wait for the other ranks and leave the group.  Leaving without waiting would
        break collectives in flight.
        """
        if self.size > 1:
            dist.barrier(self._own)
            if self._stream_barrier is not None:
                self._stream_barrier.close()
                self._stream_barrier = None
            dist.destroy_process_group(self._own)


def _collective_by_name(new: str, old: str) -> Callable[..., Any]:
    """Return a collective by its new name, or by the only one that older torch has."""
    return getattr(dist, new, None) or getattr(dist, old)
