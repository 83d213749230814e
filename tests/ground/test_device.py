"""The memory that a machine has free, in and out of containers."""

import os

import torch

from gpt2_triton import device


def test_free_and_total_bytes_of_this_machine():
    free, total = device.free_and_total_bytes("cpu")
    assert 0 < free <= total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_of_this_machine_is_that_of_the_rank_s_gpu(monkeypatch):
    """A query of another GPU would make a context there, which takes half a GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu=0: (1, 100 + gpu))
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert device.memory_bytes(None) == 102
    monkeypatch.delenv("LOCAL_RANK")
    assert device.memory_bytes(None) == 100
