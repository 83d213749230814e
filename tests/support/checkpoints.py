"""Checkpoints of made-up tensors: written, compared, and resealed by hand."""

import json
import os
from pathlib import Path

import torch

from gpt2_triton.checkpoint.format import MANIFEST, STATE, fingerprint, tensors_name
from gpt2_triton.checkpoint.load import open_checkpoint
from gpt2_triton.checkpoint.save import Retention, save_checkpoint

TENSORS = tensors_name(0)  # those of a run on one GPU
FILES = (TENSORS, STATE, MANIFEST)
STEP_10, STEP_20, STEP_30 = (f"step_{step:08d}" for step in (10, 20, 30))


def example(step, n=33):
    """Return a checkpoint's tensors in the dtypes of a run, different at every step."""
    generator = torch.Generator().manual_seed(step)
    bits = torch.randint(-(2**15), 2**15, (n,), generator=generator, dtype=torch.int16)
    moments = torch.randn(n, generator=generator)
    finite = bits & ~(1 << 14)  # no exponent is all ones
    return {
        "params": finite.view(torch.bfloat16),
        "m": moments,
        "v": moments**2,
        "low": bits.flip(0).contiguous(),
    }


def content(tensors):
    """Return dtype, shape and bytes of each tensor, for comparisons."""
    return {
        name: (t.dtype, t.shape, bytes(t.view(torch.uint8).numpy())) for name, t in tensors.items()
    }


def state(step, **keys):
    """Return the state of a checkpoint after `step` steps, without what save_checkpoint adds."""
    counts = ("sample", "skipped", "outliers", "skipped_in_a_row", "without_update", "rewinds")
    return {"step": step, "config": {}, "data": []} | dict.fromkeys(counts, 0) | keys


def write(directory, step, keep=0, every=0):
    return save_checkpoint(directory, step, example(step), state(step), Retention(keep, every))


def whole(tensor):
    """Return a StoredTensor in its shape."""
    return tensor.read(0, tensor.size).view(tensor.shape)


def load_checkpoint(step_dir):
    """Return the state and the whole tensors of a checkpoint."""
    _, saved, tensors = open_checkpoint(step_dir)
    return saved, {name: whole(tensor) for name, tensor in tensors.items()}


def reseal(step_dir: Path):
    """Write a manifest that agrees with the files, as an attacker would."""
    (step_dir / MANIFEST).write_text(
        json.dumps({name: fingerprint(step_dir / name) for name in (TENSORS, STATE)})
    )


def record_syncs(patch):
    """Return a list that gets the path of each fsync, and `rename` for each rename."""
    events, fsync, rename = [], os.fsync, os.rename
    patch.setattr(
        os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    patch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    return events


def names(directory: Path):
    return sorted(path.name for path in directory.iterdir())
