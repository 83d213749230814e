"""The memory that a machine has free, in and out of containers."""

import os

import pytest
import torch

from gpt2_triton import device

MEMINFO = "MemTotal:        8000 kB\nMemFree:         1000 kB\nMemAvailable:    6000 kB\nHugePages_Total:       0\n"


@pytest.fixture
def root(tmp_path):
    """A directory with the files of /proc of a machine of 8,000 KiB with 6,000 available, without control groups."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    (tmp_path / "proc" / "self" / "cgroup").write_text("")
    return tmp_path


def group(root, path, limit, used, cached):
    """Make a control group of version 2 at `path` with these KiB: limit, in use, page cache among them."""
    directory = root / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit if limit == 'max' else limit * 1024}\n")
    (directory / "memory.current").write_text(f"{used * 1024}\n")
    (directory / "memory.stat").write_text(f"anon 1\ninactive_file {cached * 1024}\n")


@pytest.mark.parametrize(
    ("path", "place", "limit", "kib"),
    [
        ("a/b", "a/b", 2000, (1200, 2000)),
        ("a/b", "a", 2000, (1200, 2000)),  # a group above limits the process too
        ("docker/0123", "", 1000, (200, 1000)),  # a container that sees the host's path
        ("", "", "max", (6000, 8000)),
        ("", "", 600, (0, 600)),
    ],
)
def test_host_memory_is_available_within_the_limit_of_each_control_group(root, path, place, limit, kib):
    """1,500 KiB are in use, 700 of them page cache."""
    (root / "proc/self/cgroup").write_text("4:memory:/other\n" + f"0::/{path}\n")
    group(root, place, limit, 1500, 700)
    assert tuple(n // 1024 for n in device._host_memory(root)) == kib


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


def test_free_and_total_bytes_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    assert device.free_and_total_bytes("cuda") == (1, 2)
