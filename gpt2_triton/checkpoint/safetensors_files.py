"""Write a model's tensors in safetensors files: a large model is split into several, which an index
names, so that no more than one file's tensors are in memory.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from gpt2_triton.checkpoint.source_files import CONFIG
from gpt2_triton.console import Progress
from gpt2_triton.files import copy_mode, write_json

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST = 5 * 10**9  # bytes of tensors in a file, unless one tensor has more
Shapes = Mapping[str, tuple[int, ...]]


def write(
    directory: Path, shapes: Shapes, dtype: torch.dtype, read: Callable[[str], Tensor]
) -> None:
    """Write tensors of these shapes, which `read` returns by name, beside a config.json."""
    places = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
    }
    split = split_torch_state_dict_into_shards(places, max_shard_size=LARGEST)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(directory / INDEX, index)
    elements = sum(map(math.prod, shapes.values()))
    with Progress("exporting", elements, "parameters") as progress:
        for file, names in split.filename_to_tensors.items():
            tensors = dict[str, Tensor]()
            for name in names:
                tensors[name] = read(name)
                progress.advance(tensors[name].numel())
            save_file(tensors, directory / file, metadata={"format": "pt"})
            copy_mode(directory / CONFIG, directory / file)
