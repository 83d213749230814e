"""benchmarks/losses/vs_torch.py: both programs train the same steps, and differences are found."""

import pytest

from benchmarks.losses import vs_torch
from benchmarks.losses.vs_torch import compare, differences

SMALL = """--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --model.block_size 16
    --model.vocab_size 256 --train.seq_len 16 --train.batch_size 2 --train.total_batch_tokens 32
    --train.steps 3 --optim.warmup 3 --optim.lr 1e-3 --eval.tokens 32""".split()
FP32 = ["--train.dtype", "fp32"]
MODERN = ["--model.arch", "llama", "--model.qk_norm", "true"]
CAPPED = [*MODERN, "--model.logit_cap", "0.1"]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], [*FP32, *MODERN], [*FP32, *CAPPED]], ids=str)
def test_ours_and_pytorch_agree(keys, monkeypatch):
    """Both select Triton's interpreter where there is no GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert compare(*SMALL, *keys) == 0


def test_a_difference_is_found(monkeypatch):
    ours = [dict(step=n, loss=4.0, norm=1.0) for n in (1, 2)]
    theirs = [ours[0], dict(step=2, loss=4.04, norm=1.0)]
    expected = dict(relative=0.04 / 4.04, absolute=0.04, norm=0)
    assert differences(ours, theirs) == pytest.approx(expected)
    in_fp32 = []

    def metrics_of(program, keys, *more):
        in_fp32.append("--fp32" in more)
        return ours if "train" in program else theirs

    monkeypatch.setattr(vs_torch, "metrics_of", metrics_of)
    assert compare() == compare("--optim.master", "none") == 1
    assert in_fp32 == [False, False, False, True]  # PyTorch, where ours has no fp32 masters
    theirs[1] = dict(step=2, loss=4.0, norm=1.03)
    assert compare() == 1
    theirs[1] = dict(step=2, loss=4.001, norm=1.0)
    assert (compare(), compare(*FP32)) == (0, 1)
