"""Memory shared by the processes of one host, and the fallback where it cannot be."""

import gc
import os
from pathlib import Path

import pytest
import torch

from gpt2_triton.distributed import shared_memory
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.distributed.shared_memory import SharedBuffer, open_shared
from tests.support import ranks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="forks, which a process with CUDA may not"
)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:gpt2_triton")


def test_shared_buffer_is_read_by_another_and_freed():
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    buffer = SharedBuffer(1000, "cpu")
    other = open_shared(buffer.handle(), 1000, "cpu")
    buffer.close_handle()
    buffer.memory.copy_(torch.arange(1000).to(torch.uint8))
    assert torch.equal(other, buffer.memory) and other.data_ptr() != buffer.memory.data_ptr()
    assert mapped() == before + 2 and len(os.listdir("/proc/self/fd")) == files
    del buffer, other
    gc.collect()
    assert mapped() == before


def test_open_shared_refuses_memory_without_a_handle():
    with pytest.raises(RuntimeError, match="the driver or torch does not share it"):
        open_shared(None, 1000, "cpu")


def allocate(local_world_size: str, refused: bool) -> list[list[int]]:
    """Allocate twice; return what this rank reads of each rank's memory, to which that
    rank has written its number.
    """
    os.environ["LOCAL_WORLD_SIZE"] = local_world_size
    group, found, held = ProcessGroup("cpu", 30), [], []
    if refused and group.rank == 1:

        def refuse(*_):
            raise RuntimeError("no peer access")

        shared_memory.open_shared = refuse
    for _ in range(2):
        own, seen = group.allocate_shared(1000)
        own.fill_(group.rank + 1)
        group.barrier()
        found.append([int(memory[7]) for memory in seen])
        group.barrier()
        seen.clear()
        held.append(own)
    gc.collect()
    assert mapped() == (2 if local_world_size == "2" else 0)  # its own
    group.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "local_world_size, refused, want",
    [("2", False, [1, 2]), ("2", True, []), ("1", False, []), ("", False, [])],
)
def test_allocate_shared_needs_one_host_and_all_ranks(tmp_path, local_world_size, refused, want):
    """One rank that cannot read is enough; one warning for each allocation."""
    assert (
        ranks.run(2, tmp_path / "stderr", allocate, local_world_size, refused) == [[want, want]] * 2
    )
    warning = "warning: the ranks of this host cannot read each other's memory (no peer access)"
    assert (tmp_path / "stderr").read_text().count(warning) == 2 * refused
