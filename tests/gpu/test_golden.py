"""Five steps on a recorded GPU give the losses of golden_losses.json bit for bit.

`python -m tests.gpu.test_golden` adds the row of this GPU, if two runs give the same losses.  The
file holds for each GPU, by name, the version of Triton that compiled the kernels and, by variant
and level, the losses of five steps in float's hexadecimal notation:
    {"NVIDIA H200": {"triton": "3.6.0", "bf16": {"none":
    ["0x1.5a2b3cp+3", ...], ...}, "fp32": {...}}}
Write it with code whose bits are known to be right, and again only after a change
that is meant to change them.
"""

import json
from pathlib import Path

import pytest
import triton

from gpt2_triton import device
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from tests.gpu.test_gpu import HAS_FP8, PRECISIONS, wide_model
from tests.support.models import train_steps

pytestmark = pytest.mark.gpu
PATH = Path(__file__).with_name("golden_losses.json")
ROWS = json.loads(PATH.read_text())
GPT2 = {"fp32": dict(dtype="fp32")} | {name: dict(precision=name) for name in PRECISIONS}
NORMED = {f"{name}, qk_norm": dict(precision=name, arch="qk_norm") for name in ("bf16", "fp8")}
VARIANTS = GPT2 | NORMED


def losses(variant: str, level: str) -> list[str]:
    """Return the losses of five steps of 2 layers of GPT-2's width, B 2, T 256, with seed
    1 and train_steps' tokens.
    """
    model = wide_model(**VARIANTS[variant], level=level)
    return [float(loss).hex() for loss, _, _ in train_steps(model, 5)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_five_steps_give_the_golden_losses(variant, level):
    if (name := device.name()) not in ROWS:
        pytest.skip(f"no losses are recorded for {name}, only for {', '.join(ROWS)}")
    if ROWS[name]["triton"] != triton.__version__:
        pytest.skip(
            f"recorded with Triton {ROWS[name]['triton']}, "
            f"here is {triton.__version__}: other machine code"
        )
    if variant not in ROWS[name]:
        pytest.skip(f"no losses of {variant} are recorded for {name}")
    assert losses(variant, level) == ROWS[name][variant][level]


if __name__ == "__main__":
    variants = [variant for variant in VARIANTS if HAS_FP8 or "fp8" not in variant]
    row, again = (
        {v: {level: losses(v, level) for level in RECOMPUTE_LEVELS} for v in variants}
        for _ in range(2)
    )
    assert row == again, "two runs gave different losses; nothing was written"
    rows = ROWS | {device.name(): {"triton": triton.__version__, **row}}
    PATH.write_text(json.dumps(rows, indent=1) + "\n")
