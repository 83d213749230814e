"""tests/gpu/shared_gpu.py names the launch that differs."""

import re

import pytest
import torch

import gpt2_triton.kernels as kernels
from tests.gpu.shared_gpu import differing, one_pass, one_replay, prepare


def prepare_tiny():
    return prepare(
        "bf16",
        model=dict(n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16),
        train=dict(batch_size=2, seq_len=16, total_batch_tokens=32, dtype="bf16"),
        memory=dict(recompute="gelu+ln"),
    )


@pytest.mark.slow
def test_the_first_launch_that_differs_is_named(monkeypatch):
    model, pristine = prepare_tiny()
    want, replayed = one_pass(model, pristine), one_replay(model, pristine)
    assert (
        differing(one_pass(model, pristine), want)
        == differing(one_replay(model, pristine), replayed)
        == ""
    )
    launch = kernels.classifier_dx

    def wrong(dln, *args, **keywords):
        launch(dln, *args, **keywords)
        dln.view(torch.int16)[3, 1] ^= 64

    number = next(i for i, (name, _) in enumerate(want) if name == "classifier_dx")
    monkeypatch.setattr(kernels, "classifier_dx", wrong)
    line = differing(one_pass(model, pristine), want)
    assert re.fullmatch(
        rf"classifier_dx \(launch {number}, output 0; [1-9]\d* later ones differ\)", line
    )
    wrong_model, pristine = prepare_tiny()  # a graph keeps the launches of its capture
    assert (
        differing(one_replay(wrong_model, pristine), replayed)
        == "a graph (launch 0, output 0; 0 later ones differ)"
    )
