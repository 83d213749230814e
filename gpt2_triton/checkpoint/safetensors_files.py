"""Write a model's tensors in safetensors files: a large model is split into several, which an index
names, so that no more than one file's tensors are in memory.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from gpt2_triton.checkpoint.source_files import CONFIG
from gpt2_triton.files import write_json

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST = 5 * 10**9  # bytes of tensors in a file, unless one tensor has more
Shapes = Mapping[str, tuple[int, ...]]


def write(directory: Path, shapes: Shapes, element: int, tensors: Iterator[Tensor]) -> None:
    """Write tensors of these shapes, with `element` bytes a number, beside a config.json."""
    files = _split(shapes, element)
    names = [MODEL]
    if len(files) > 1:
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        where = {tensor: name for name, tensors in zip(names, files) for tensor in tensors}
        elements = sum(map(math.prod, shapes.values()))
        sizes = {"total_parameters": elements, "total_size": elements * element}
        write_json(directory / INDEX, {"metadata": sizes, "weight_map": where})
    for name, of_file in zip(names, files, strict=True):
        content = {tensor: next(tensors) for tensor in of_file}
        save_file(content, directory / name, metadata={"format": "pt"})
        with suppress(OSError):  # mounts of Windows refuse it
            # safetensors makes its files private
            shutil.copymode(directory / CONFIG, directory / name)


def _split(shapes: Shapes, element: int) -> list[list[str]]:
    """Return the tensors of each file: LARGEST bytes at most, or one tensor."""
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        size += math.prod(shape) * element
        if files[-1] and size > LARGEST:
            files.append([])
            size = math.prod(shape) * element
        files[-1].append(name)
    return files
