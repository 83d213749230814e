"""Errors of the process group when other ranks are gone."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.errors import PeerLostError


def gone(*_arguments, **_names):
    raise RuntimeError(
        "[/torch/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:9. This is typical. Good luck\nframe"
    )


def test_failed_collective_is_one_line_with_torchs_first_sentence():
    with pytest.raises(PeerLostError) as lost:
        ProcessGroup("cpu", 30)._collective(gone)
    assert str(lost.value).startswith("gone failed (Connection closed by peer [10.0.0.1]:9): another rank has exited;")
    assert len(str(lost.value).splitlines()) == 1


@pytest.mark.parametrize(("messages", "all_raise_it"), [("aa", True), ("ab", False), ("a", False)])
def test_ranks_find_out_whether_all_end_with_the_same_error(messages, all_raise_it):
    """In the last case the other rank has no error."""
    store = HashStore()

    def end(rank):
        return ControlGroup("errors", rank, 2, store).is_raised_by_all(messages[rank], 30 if len(messages) > 1 else 0)

    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(end, range(len(messages)))] == [all_raise_it] * len(messages)


def test_lost_store_is_one_line():
    with pytest.raises(PeerLostError, match="^rank 0 or the launcher has exited; .*$"):
        ControlGroup("name", 1, 2, SimpleNamespace(set=gone)).all_gather(1)
    assert not ControlGroup("name", 1, 2, SimpleNamespace(set=gone)).is_raised_by_all("a")
