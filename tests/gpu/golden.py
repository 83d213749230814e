"""Trains five steps at each recompute level and writes their losses to golden_losses.json.

`python -m tests.gpu.golden --write` adds the row of this GPU.

The file holds for each GPU, by name, the version of Triton that compiled the kernels and, by variant and level, the
losses of five steps in float's hexadecimal notation:
    {"NVIDIA H200": {"triton": "3.6.0", "bf16": {"none": ["0x1.5a2b3cp+3", ...], ...}, "fp32": {...}}}
Write it with code whose bits are known to be right, and again only after a change that is meant to change them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from gpt2_triton.config.values import RECOMPUTE_LEVELS
from tests.gpu.test_gpu import HAS_FP8, PRECISIONS, gpt2_model
from tests.support.models import train_steps

PATH = Path(__file__).with_name("golden_losses.json")
VARIANTS = ("fp32", *PRECISIONS)
STEPS = 5


def losses(variant: str, level: str) -> list[str]:
    """Return the losses of the first steps of 2 layers of GPT-2's width, B 2, T 256, with the weights of seed 1 and the
    tokens of train_steps, which differ from step to step.
    """
    numbers = dict(dtype="fp32") if variant == "fp32" else dict(precision=variant)
    model = gpt2_model(**numbers, level=level)
    return [float(loss).hex() for loss, _, _ in train_steps(model, STEPS)]


def read() -> dict[str, dict[str, Any]]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def write() -> None:
    """Replace the row of this GPU if two runs give the same losses."""
    rows = read()
    variants = [v for v in VARIANTS if HAS_FP8 or "fp8" not in v]
    measured, again = ({v: {level: losses(v, level) for level in RECOMPUTE_LEVELS} for v in variants} for _ in range(2))
    if measured != again:
        sys.exit("two runs gave different losses; nothing was written")
    rows[torch.cuda.get_device_name()] = {"triton": triton.__version__, **measured}
    PATH.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"] or not torch.cuda.is_available():
        sys.exit("usage, on a GPU: python -m tests.gpu.golden --write")
    write()
