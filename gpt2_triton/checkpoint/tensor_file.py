"""Write a safetensors file piece by piece, and report each piece that is on the disk.

The library writes a file in one call, and its sync and hash take two more: minutes on a slow disk, in which a watchdog
cannot tell a slow save from one that hangs.  The bytes are those of the library.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 26  # bytes between two syncs
# names of the format, in the order of the library: wide elements first, so that every tensor is aligned
DTYPES = {torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint8: "U8"}
ORDER = list(DTYPES)

Progress = Callable[[str, int], None]  # what a save does, and the bytes it has written since the last call


def write_tensors(path: Path, tensors: dict[str, Tensor], progress: Progress) -> dict[str, Any]:
    """Write contiguous host tensors and sync the file; return its entry in the manifest.  OSError if that fails."""
    names = sorted(tensors, key=lambda name: (ORDER.index(tensors[name].dtype), name))
    digest, size, unsynced = hashlib.sha256(), 0, 0
    with open(path, "wb") as file:
        for part in (memoryview(_header(names, tensors)), *(_bytes(tensors[name]) for name in names)):
            for start in range(0, len(part), CHUNK):
                piece = part[start : start + CHUNK]
                digest.update(piece)
                file.write(piece)
                unsynced += len(piece)
                if unsynced >= CHUNK:
                    file.flush()
                    os.fdatasync(file.fileno())
                    progress(f"writing {path.name}", unsynced)
                    size, unsynced = size + unsynced, 0
        file.flush()
        os.fsync(file.fileno())
    progress(f"writing {path.name}", unsynced)
    return {"bytes": size + unsynced, "sha256": digest.hexdigest()}


def _header(names: list[str], tensors: dict[str, Tensor]) -> bytes:
    """Return the length of the JSON as 8 bytes, and the JSON, padded to a multiple of 8."""
    entries, start = {}, 0
    for name in names:
        tensor, end = tensors[name], start + tensors[name].nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
