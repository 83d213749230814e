"""A whole step through Hopper's kernels, in gluon_simulator."""

import contextlib
import math

import pytest
import torch

from gpt2_triton.kernels import hopper, tuning
from tests.gpu.shared_gpu import differing, dirty, one_pass, prepare
from tests.support import gluon_simulator as simulator

SHARED = {"attention_fwd", "attention_dq", "attention_dkdv", "classifier"}
IN_FP8 = {
    "fp8_matmul",
    "fp8_gelu",
    "fp8_matmul_dw",
    "cast",
    "transpose",
    "classifier_dx",
    "classifier_lns",
}
# by precision
LAUNCHED = {"bf16": SHARED | {"matmul", "matmul_dw", "matmul_wide"}, "fp8": SHARED | IN_FP8}


@pytest.fixture
def on_hopper(monkeypatch):
    """Choose and simulate kernels as on an H200, with tiles of 320 columns and the table
    of the interpreter; yield the set of launched modules.
    """
    launched, launch = set(), simulator.Kernel.__getitem__

    def recorded(kernel, grid):
        launched.add(kernel.function.__globals__["__name__"].rpartition(".")[2])
        return launch(kernel, grid)

    monkeypatch.setattr(simulator.Kernel, "__getitem__", recorded)
    monkeypatch.setattr(tuning, "is_hopper", lambda: True)
    monkeypatch.setattr(hopper, "wide_is_faster", lambda M, N: N % 320 == 0)
    with contextlib.ExitStack() as stack:
        for module in simulator.KERNELS:
            stack.enter_context(simulator.simulated(module, seed=1))
        yield launched


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/shared_gpu.py does this on a GPU")
@pytest.mark.parametrize("precision", LAUNCHED)
def test_a_step_does_not_depend_on_what_buffers_held_before(on_hopper, precision):
    """A chunk of the head is a part of the rows; products have tiles of 256 and of 320 columns."""
    model, pristine = prepare(
        precision,
        model=dict(n_layer=1, n_head=5, n_embd=320, vocab_size=300, block_size=64),
        train=dict(batch_size=2, seq_len=64, total_batch_tokens=128, dtype="bf16"),
        memory=dict(recompute="gelu+ln", head_rows=96),
        fp8=dict(keep_bf16="none"),
    )
    want = one_pass(model, pristine)
    # a fifth of the tokens has no target
    loss, norm, _, applied = model.state.step_out[:4].tolist()
    assert abs(loss - 0.8 * math.log(300)) < 0.1 and 0 < norm < 100 and applied == 1
    assert on_hopper == LAUNCHED[precision]
    filled = dirty(model, pristine)
    assert (filled != pristine).float().mean() > 0.3
    assert differing(one_pass(model, filled), want) == ""
