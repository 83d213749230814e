"""Five steps on a recorded GPU give the losses of golden_losses.json bit for bit; golden.py writes that file."""

import pytest
import torch
import triton

from gpt2_triton.config.values import RECOMPUTE_LEVELS
from tests.gpu import golden

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", golden.VARIANTS)
@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_five_steps_give_the_golden_losses(variant, level):
    name, rows = torch.cuda.get_device_name(), golden.read()
    if name not in rows:
        pytest.skip(f"no losses are recorded for {name}, only for {', '.join(rows) or 'no GPU'}")
    if rows[name]["triton"] != triton.__version__:
        pytest.skip(f"recorded with Triton {rows[name]['triton']}, here is {triton.__version__}: other machine code")
    if variant not in rows[name]:
        pytest.skip(f"{name} has no products in fp8")
    assert golden.losses(variant, level) == rows[name][variant][level]
