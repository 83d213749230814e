"""The memory that a machine has free, in and out of containers."""

import os

import pytest
import torch

from gpt2_triton import device


def test_free_and_total_bytes_of_this_machine():
    free, total = device.free_and_total_bytes("cpu")
    assert 0 < free <= total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


MIB = 2**20
LIMITED = {  # /proc/self/cgroup, and the files below /sys/fs/cgroup with a limit in MiB
    "v2": ("0::/job/step", {"job/memory.max": 4, "job/step/memory.max": None}),
    "v2 in a container": ("0::/", {"memory.max": 4}),
    "v1": ("4:cpu,memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": 4}),
    "v1 in a container": ("4:memory:/docker/1a2b", {"memory/memory.limit_in_bytes": 4}),
}
UNLIMITED = {"v1": ("4:memory:/", {"memory/memory.limit_in_bytes": 2**43}), "v2": ("0::/", {})}


def make_groups(tmp_path, patch, named, files):
    """Let the process be in control groups of which each has 1 MiB of its own
    and 2 MiB of pages of files.
    """
    (tmp_path / "named").write_text(named + "\n")
    for name, limit in files.items():
        group = (tmp_path / name).parent
        group.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{limit * MIB if limit else 'max'}\n")
        (group / "memory.stat").write_text(f"anon {MIB}\ntotal_rss {MIB}\nfile {2 * MIB}\n")
    patch.setattr(device, "CGROUPS_OF_PROCESS", tmp_path / "named")
    patch.setattr(device, "CGROUP", tmp_path)


@pytest.mark.parametrize("case", LIMITED)
def test_memory_of_a_container_is_its_limit(tmp_path, monkeypatch, case):
    make_groups(tmp_path, monkeypatch, *LIMITED[case])
    assert device.free_and_total_bytes("cpu") == (3 * MIB, 4 * MIB)


@pytest.mark.parametrize("case", UNLIMITED)
def test_memory_without_a_limit_is_the_machine_s(tmp_path, monkeypatch, case):
    make_groups(tmp_path, monkeypatch, *UNLIMITED[case])
    free, total = device.free_and_total_bytes("cpu")
    assert 4 * MIB < free <= total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_of_this_machine_is_that_of_the_rank_s_gpu(monkeypatch):
    """A query of another GPU would make a context there, which takes half a GiB."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu=0: (1, 100 + gpu))
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert device.memory_bytes(None) == 102
    monkeypatch.delenv("LOCAL_RANK")
    assert device.memory_bytes(None) == 100
