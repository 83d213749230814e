"""Write safetensors files part by part, as the package safetensors cannot.

A file is the length of its header as a little-endian uint64, the header (JSON: each tensor's dtype,
shape and place in the bytes that follow), and the tensors' bytes.  A large model is split into
files, which an index names.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST = 5 * 10**9  # bytes of tensors in a file, unless one tensor has more
DTYPES = {"fp32": ("F32", 4), "bf16": ("BF16", 2)}
Shapes = Mapping[str, tuple[int, ...]]


def write(directory: Path, shapes: Shapes, dtype: str, parts: Iterator[np.ndarray]) -> None:
    """Write tensors of these shapes in dtype "fp32" or "bf16"; `parts` are their
    elements, one after the other.
    """
    files = _split(shapes, DTYPES[dtype][1])
    names = [MODEL]
    if len(files) > 1:
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        where = {tensor: name for name, tensors in zip(names, files) for tensor in tensors}
        elements = sum(map(math.prod, shapes.values()))
        sizes = {"total_parameters": elements, "total_size": elements * DTYPES[dtype][1]}
        index = json.dumps({"metadata": sizes, "weight_map": where}, indent=2, sort_keys=True)
        (directory / INDEX).write_text(index + "\n", encoding="utf-8")
    for name, tensors in zip(names, files, strict=True):
        with open(directory / name, "wb") as file:
            header, left = _header(tensors, dtype)
            file.write(header)
            while left:
                part = next(parts)
                file.write(part.data)
                left -= part.nbytes


def _split(shapes: Shapes, element: int) -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors of each file: LARGEST bytes at most, or one tensor."""
    files = [dict[str, tuple[int, ...]]()]
    size = 0
    for name, shape in shapes.items():
        size += math.prod(shape) * element
        if files[-1] and size > LARGEST:
            files.append({})
            size = math.prod(shape) * element
        files[-1][name] = shape
    return files


def _header(shapes: Shapes, dtype: str) -> tuple[bytes, int]:
    """Return what stands before the tensors' bytes, and the number of these bytes."""
    stored, element = DTYPES[dtype]
    at = 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        end = at + math.prod(shape) * element
        header[name] = {"dtype": stored, "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8
    return len(text).to_bytes(8, "little") + text, at
