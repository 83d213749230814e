"""tests/gpu/shared_gpu.py: equal passes, and the launch that it names when one differs."""

import pytest
import torch

import gpt2_triton.kernels as kernels
from tests.gpu import shared_gpu
from tests.gpu.shared_gpu import dirty, one_pass, prepare


def small(precision):
    model, pristine = prepare(
        precision,
        model=dict(n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16),
        train=dict(batch_size=2, seq_len=16, total_batch_tokens=32, dtype="bf16"),
        memory=dict(recompute="gelu+ln"),
    )
    return model, pristine, one_pass(model, pristine)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_does_not_depend_on_what_buffers_held_before(precision):
    model, pristine, want = small(precision)
    assert shared_gpu.differing(one_pass(model, pristine), want) == ""
    filled = dirty(model, pristine)
    assert (filled != pristine).float().mean() > 0.3
    assert shared_gpu.differing(one_pass(model, filled), want) == ""


def test_the_first_launch_that_differs_is_named(monkeypatch):
    model, pristine, want = small("bf16")
    launch = kernels.layernorm_bwd

    def wrong(dx, *args, **keywords):
        launch(dx, *args, **keywords)
        dx.view(torch.int16)[3, 1] ^= 1

    number = next(i for i, (name, _) in enumerate(want) if name == "layernorm_bwd")
    monkeypatch.setattr(kernels, "layernorm_bwd", wrong)
    line = f"launch {number}, layernorm_bwd, output 0"
    assert shared_gpu.differing(one_pass(model, pristine), want) == line
