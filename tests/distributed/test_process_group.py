"""Errors of the process group when other ranks are gone."""

from types import SimpleNamespace

import pytest

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


def test_lost_store_is_one_line():
    with pytest.raises(PeerLostError, match="^rank 0 or the launcher has exited; .*$"):
        ControlGroup("name", 1, 2, SimpleNamespace(set=gone)).all_gather(1)
