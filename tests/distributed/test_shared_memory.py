"""Memory that the processes of one host open to each other."""

import gc
import os
from pathlib import Path

import pytest
import torch

from gpt2_triton.distributed import process_group
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.distributed.shared_memory import Window, opened
from tests.support import ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which a process with CUDA may not")


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:gpt2_triton")


def test_what_one_writes_the_other_reads_and_nothing_remains():
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    window = Window(1000, "cpu")
    other = opened(window.handle(), 1000, "cpu")
    window.settle()
    window.memory.copy_(torch.arange(1000).to(torch.uint8))
    assert torch.equal(other, window.memory) and other.data_ptr() != window.memory.data_ptr()
    assert mapped() == before + 2 and len(os.listdir("/proc/self/fd")) == files
    del window, other
    gc.collect()
    assert mapped() == before


def test_memory_that_its_owner_cannot_share_is_not_opened():
    with pytest.raises(RuntimeError, match="CUDA does not share it"):
        opened(None, 1000, "cpu")


def allocate(near: str, blind: bool) -> list[list[int]]:
    """Of two allocations, what this rank sees when each rank has written its number and they have met."""
    os.environ["LOCAL_WORLD_SIZE"] = near
    group, found, held = ProcessGroup("cpu", 30), [], []
    if blind and group.rank == 1:

        def refuse(*_):
            raise RuntimeError("no peer access")

        process_group.opened = refuse
    for _ in range(2):
        own, seen = group.allocate_shared(1000)
        own.fill_(group.rank + 1)
        group.barrier()
        found.append([int(memory[7]) for memory in seen])
        group.barrier()
        seen.clear()
        held.append(own)
    gc.collect()
    assert mapped() == (2 if near == "2" else 0)  # its own
    group.close()
    return found


def handles_given() -> int:
    given, original = [], Window.handle

    def handle(self):
        given.append(original(self))
        return given[-1]

    Window.handle = handle
    group = ProcessGroup("cpu", 30)
    group.allocate_shared(1000)[1].clear()
    group.close()
    return len(given)


def test_every_reader_has_a_handle_of_its_own(tmp_path):
    """torch counts in a handle how many hold it, from one to none: with two readers it would end below."""
    assert ranks.run(3, tmp_path / "stderr", handles_given) == [2, 2, 2]


@pytest.mark.parametrize(
    "near, blind, want", [("2", False, [1, 2]), ("2", True, []), ("1", False, []), ("", False, [])]
)
def test_ranks_see_each_others_memory_on_one_host_or_none_does(tmp_path, near, blind, want):
    """One that cannot read is enough, and is spoken of once for each allocation."""
    assert ranks.run(2, tmp_path / "stderr", allocate, near, blind) == [[want, want]] * 2
    warning = "warning: the ranks of this host cannot read each other's memory (no peer access)"
    assert (tmp_path / "stderr").read_text().count(warning) == 2 * blind
