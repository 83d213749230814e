"""What a checkpoint is asked besides its hashes: whether it fits on the disk, and whether its numbers are numbers."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpt2_triton import files

FILES_BYTES = 1 << 20  # state, manifest and the header of the tensors, with room to spare
SCAN = 1 << 20  # elements looked at together: they stay in the cache, and a core does 7 GB/s
# integers of the same size, and the bits of the exponent: all are set in infinities and NaNs, and in nothing else
EXPONENT = {torch.bfloat16: (torch.int16, 0x7F80), torch.float32: (torch.int32, 0x7F800000)}


def missing_space(directory: Path, tensors: dict[str, Tensor], shares: int = 1) -> str | None:
    """What is missing for a checkpoint of `shares` times these tensors under `directory`, which need not be there
    yet.
    """
    missing = files.missing_space(directory, shares * sum(t.nbytes for t in tensors.values()) + FILES_BYTES)
    return f"{missing[0]:,} bytes needed, {missing[1]:,} free" if missing else None


def first_non_finite(tensors: dict[str, Tensor]) -> str | None:
    """Where the first NaN or infinity is, in bf16 or fp32 host tensors; integers have none."""
    for name, tensor in tensors.items():
        integer, exponent = EXPONENT.get(tensor.dtype, (None, 0))
        if integer is None:
            continue
        bits = tensor.view(integer).numpy().reshape(-1)
        for start in range(0, len(bits), SCAN):
            found = (bits[start : start + SCAN] & exponent) == exponent
            if found.any():
                return f"{name}: a NaN or an infinity at element {start + int(np.argmax(found)):,}"
    return None
