"""tests/gpu/shared_gpu.py: equal passes, and the launch that it names when one differs."""

import re
import sys

import pytest
import torch

import gpt2_triton.kernels as kernels
from tests.gpu import shared_gpu
from tests.gpu.shared_gpu import another_process, dirty, one_pass, one_replay, prepare


def small(precision):
    model, pristine = prepare(
        precision,
        model=dict(n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16),
        train=dict(batch_size=2, seq_len=16, total_batch_tokens=32, dtype="bf16"),
        memory=dict(recompute="gelu+ln"),
    )
    return model, pristine, one_pass(model, pristine)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_does_not_depend_on_what_buffers_held_before(precision):
    model, pristine, want = small(precision)
    assert shared_gpu.differing(one_pass(model, pristine), want) == ""
    filled = dirty(model, pristine)
    assert (filled != pristine).float().mean() > 0.3
    assert shared_gpu.differing(one_pass(model, filled), want) == ""


@pytest.mark.slow
def test_the_first_launch_that_differs_is_named(monkeypatch):
    model, pristine, want = small("bf16")
    launch = kernels.classifier_dx

    def wrong(dln, *args, **keywords):
        launch(dln, *args, **keywords)
        dln.view(torch.int16)[3, 1] ^= 64

    number = next(i for i, (name, _) in enumerate(want) if name == "classifier_dx")
    monkeypatch.setattr(kernels, "classifier_dx", wrong)
    line = shared_gpu.differing(one_pass(model, pristine), want)
    assert re.fullmatch(rf"classifier_dx \(launch {number}, output 0; [1-9]\d* later ones differ\)", line)


@pytest.mark.slow
def test_graphs_are_compared_by_gradients_and_results(monkeypatch):
    model, pristine, _ = small("bf16")
    want = one_replay(model, pristine)
    assert shared_gpu.differing(one_replay(model, pristine), want) == ""
    pristine[model.state.params.data_ptr() - model.arena.data_ptr()] ^= 64
    assert (
        shared_gpu.differing(one_replay(model, pristine), want) == "a graph (launch 0, output 0; 0 later ones differ)"
    )


def test_the_other_process_runs_to_the_end_of_the_block():
    program = "import time; print('running', flush=True); time.sleep({})"
    with another_process([sys.executable, "-c", program.format(600)]):
        pass
    with pytest.raises(RuntimeError, match="ended with code 0"):
        with another_process([sys.executable, "-c", program.format(0)]) as process:
            process.wait()
    with pytest.raises(RuntimeError, match="did not begin"):
        with another_process([sys.executable, "-c", "raise SystemExit(3)"]):
            raise AssertionError
