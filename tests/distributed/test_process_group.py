"""The process group: errors when other ranks are gone, and a group that
the program has made before.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.errors import PeerLostError
from tests.support import ranks


def gone(*_arguments, **_names):
    raise RuntimeError(
        "[/torch/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:9. "
        "This is typical. Good luck\nframe"
    )


def test_failed_collective_is_one_line_with_torchs_first_sentence():
    with pytest.raises(PeerLostError) as lost:
        ProcessGroup("cpu", 30)._collective(gone)
    assert str(lost.value).startswith(
        "gone failed (Connection closed by peer [10.0.0.1]:9): another rank has exited;"
    )
    assert len(str(lost.value).splitlines()) == 1


def test_lost_store_is_one_line():
    with pytest.raises(PeerLostError, match="^rank 0 or the launcher has exited; .*$"):
        ControlGroup("name", 1, 2, SimpleNamespace(set=gone)).all_gather(1)


def test_one_rank_of_a_host_goes_first():
    store, order = dist.HashStore(), []

    def join(rank):
        def work():
            time.sleep(0.1 * (1 - rank))
            order.append(rank)
            return rank

        turns = ControlGroup("turns", rank, 2, store)
        return ProcessGroup.first_on_host(SimpleNamespace(local_rank=rank, _turns=turns), work)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(join, (1, 0))] == [1, 0]
    assert order == [0, 1]


def beside_a_group_of_the_program():
    """Return the sum of ranks + 1 in our group, twice, and then in the program's."""
    numbers = [torch.full((1,), int(os.environ["RANK"]) + 1) for _ in range(3)]
    dist.init_process_group("gloo")
    for ours in numbers[:2]:
        group = ProcessGroup("cpu", 30)
        group.all_reduce(ours)
        group.close()
    dist.all_reduce(numbers[2])
    dist.destroy_process_group()
    return torch.cat(numbers).tolist()


@pytest.mark.slow
def test_group_of_the_program_stays(tmp_path):
    assert ranks.run(2, tmp_path / "stderr", beside_a_group_of_the_program) == [[3, 3, 3]] * 2
