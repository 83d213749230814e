"""The memory that a machine has free, in and out of containers."""

import os

import pytest
import torch

from gpt2_triton import device

MEMINFO = "MemTotal:        8000 kB\nMemFree:         1000 kB\nMemAvailable:    6000 kB\nHugePages_Total:       0\n"
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def root(tmp_path):
    """A directory with the files of /proc of a machine of 8,000 KiB with 6,000 available, without control groups."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    (tmp_path / "proc" / "self" / "cgroup").write_text("")
    return tmp_path


def group(root, path, names, limit, used, cached):
    directory = root / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"rss 1\n{names[2]} {cached}\n")


def kib(root):
    return tuple(n // 1024 for n in device._host_memory(root))


def test_host_memory_is_what_the_machine_has_available(root):
    assert kib(root) == (6000, 8000)


@pytest.mark.parametrize(
    ("names", "line", "place"),
    [
        (V2, "0::/a/b", "a/b"),
        (V2, "0::/a/b", "a"),
        (V1, "4:cpu,memory:/a/b", "memory/a/b"),
        (V1, "4:memory:/a", "memory"),
    ],
)
def test_host_memory_is_within_the_limit_of_each_control_group(root, names, line, place):
    """2,000 KiB are allowed, 1,500 in use, 700 of those page cache.  A group above it limits the process too."""
    (root / "proc/self/cgroup").write_text(f"1:cpu:/other\n{line}\n")
    group(root, place, names, 2000 * 1024, 1500 * 1024, 700 * 1024)
    assert kib(root) == (1200, 2000)


@pytest.mark.parametrize(
    ("names", "line", "place", "limit"), [(V2, "0::/", "", "max"), (V1, "4:memory:/", "memory", 2**63)]
)
def test_host_memory_of_groups_without_a_limit_is_the_machine_s(root, names, line, place, limit):
    (root / "proc/self/cgroup").write_text(f"{line}\n")
    group(root, place, names, limit, 1500 * 1024, 0)
    assert kib(root) == (6000, 8000)


def test_host_memory_in_a_container_that_sees_the_host_s_path(root):
    (root / "proc/self/cgroup").write_text("0::/docker/0123\n")
    group(root, "", V2, 3000 * 1024, 4000 * 1024, 0)
    assert kib(root) == (0, 3000)


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
