"""Our safetensors files are those of the library, and every byte is reported once it is on the disk."""

import os

import pytest
import torch
from safetensors.torch import save

from gpt2_triton.checkpoint import tensor_file
from gpt2_triton.checkpoint.format import fingerprint
from gpt2_triton.checkpoint.tensor_file import write_tensors
from tests.support.checkpoints import example

MIXED = {
    "z": torch.arange(5, dtype=torch.uint8),
    "b": torch.ones(3, 2, dtype=torch.bfloat16),
    'a "quoted" é': torch.arange(6, dtype=torch.int16),
    "empty": torch.empty(0),
    "i": torch.arange(3, dtype=torch.int32),
    "f": torch.arange(4.0),
    "scalar": torch.tensor(2.5),
}


@pytest.mark.parametrize("tensors", [example(10), example(20, 1001), MIXED, {"x": torch.zeros(1)}])
@pytest.mark.parametrize("chunk", [16, 1 << 26])
def test_bytes_are_those_of_the_library(tmp_path, monkeypatch, tensors, chunk):
    monkeypatch.setattr(tensor_file, "CHUNK", chunk)
    entry = write_tensors(tmp_path / "x", tensors, lambda what, nbytes: None)
    assert (tmp_path / "x").read_bytes() == save(tensors)
    assert entry == fingerprint(tmp_path / "x")


def test_progress_reports_what_is_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK", 256)
    reported, synced = [], []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda file: synced.append(os.fstat(file).st_size))
    write_tensors(tmp_path / "x", example(10, 1000), lambda what, nbytes: reported.append((what, nbytes, synced[-1])))
    size = (tmp_path / "x").stat().st_size
    assert {what for what, _, _ in reported} == {"writing x"} and len(reported) > size // 512
    total = 0
    for _, nbytes, on_disk in reported:
        total += nbytes
        assert total == on_disk
    assert total == size
