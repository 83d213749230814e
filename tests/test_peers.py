"""Memory that processes of one host open to each other."""

from pathlib import Path

import pytest
import torch

from gpt2_triton.peers import Window, opened


def test_what_one_writes_the_other_reads_and_no_name_remains():
    window = Window(1000, "cpu")
    handle = window.handle()
    other = opened(handle, 1000, "cpu")
    window.forget()
    window.memory.copy_(torch.arange(1000).to(torch.uint8))
    assert torch.equal(other, window.memory) and other.data_ptr() != window.memory.data_ptr()
    assert handle is not None and not Path(handle[0]).exists()


def test_memory_that_its_owner_cannot_share_is_not_opened():
    with pytest.raises(RuntimeError, match="CUDA does not share it"):
        opened(None, 1000, "cpu")
