"""The memory that a machine has free, in and out of containers."""

import os

import pytest
import torch

from gpt2_triton import device


def test_free_and_total_bytes_of_this_machine():
    free, total = device.free_and_total_bytes("cpu")
    assert 0 < free <= total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("place", "limit", "expected"),
    [
        ("a/b", 2048000, (1200, 2000)),
        ("a", 2048000, (1200, 2000)),
        (".", 1024000, (200, 1000)),
        ("a", "max", (6000, 8000)),
    ],
)
def test_host_memory_is_within_the_limit_of_each_control_group(tmp_path, place, limit, expected):
    """A group above the process limits it too.  1,500 KiB are in use, 700 of them page cache."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  8000 kB\nMemAvailable:  6000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/other\n0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup" / place
    group.mkdir(parents=True)
    for name, text in (("max", limit), ("current", 1536000), ("stat", "anon 1\ninactive_file 716800")):
        (group / f"memory.{name}").write_text(f"{text}\n")
    assert tuple(n // 1024 for n in device._host_memory(tmp_path)) == expected


def test_memory_of_this_machine_is_that_of_the_rank_s_gpu(monkeypatch):
    """A query of another GPU would make a context there, which takes half a GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu=0: (1, 100 + gpu))
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert device.memory_bytes(None) == 102
    monkeypatch.delenv("LOCAL_RANK")
    assert device.memory_bytes(None) == 100


def test_free_and_total_bytes_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    assert device.free_and_total_bytes("cuda") == (1, 2)
