"""benchmarks/accuracy/gradients.py: its measures, and fp8's gradients beside
PyTorch's with rounded operands.
"""

import math

import numpy as np
import pytest
import torch

import gpt2_triton.kernels as K
from benchmarks import torch_reference
from benchmarks.accuracy import gradients
from gpt2_triton import device
from gpt2_triton.model.gpt2.buffers import Params
from gpt2_triton.model.model import Model
from tests.support.rounded import rounded_gradients
from tests.support.tiny import tiny_config


def test_kinds_of_tensors_have_q_k_and_v_apart():
    want = {"qkvw[0]": torch.arange(1.0, 7.0).view(6, 1), "wte": torch.ones(2)}
    found = {"qkvw[0]": want["qkvw[0]"].clone(), "wte": torch.tensor([1.0, -1.0])}
    found["qkvw[0]"][2:4] *= 2  # k
    kinds = gradients.by_kind(found, want)
    assert list(kinds) == ["qw", "kw", "vw", "wte", "all"]
    assert [kinds[name].along for name in kinds][:4] == [
        (1.0, 1.0),
        (2.0, 2.0),
        (1.0, 1.0),
        (0.0, 0.0),
    ]
    g, e = (torch.cat([tensors[name].flatten() for name in want]) for tensors in (found, want))
    assert math.isclose(kinds["all"].error, (g - e).norm() / e.norm(), rel_tol=1e-6)
    assert math.isclose(kinds["all"].cosine, torch.dot(g, e) / (g.norm() * e.norm()), rel_tol=1e-6)


def gradients_by_rounding(params, dims, tokens):
    """Return the gradients of PyTorch in fp32, with all operands of the
    layers' products rounded.
    """
    rows = torch.from_numpy(tokens.reshape(-1, tokens.shape[-1]).astype(np.int64)).to(params.device)
    words = rows[:, :-1], rows[:, 1:], dims["V"], dims["NH"]
    return rounded_gradients(
        params,
        dims,
        Params,
        lambda leaves, linear: torch_reference.gpt2_loss(leaves, *words, linear=linear),
    )


@pytest.mark.slow
def test_fp8_costs_what_rounding_in_pytorch_costs():
    """Three heads and 192 channels: in every kind of tensor our error is e4m3's, which scales of
    earlier steps and bytes of gelu' change by less than half.
    """
    model = dict(n_layer=2, n_head=3, n_embd=192, vocab_size=300, block_size=32)
    saved = tiny_config(model=model, train=dict(seq_len=32), memory=dict(recompute="auto"))
    tokens = np.random.default_rng(0).integers(0, 300, (1, 2, 33), dtype=np.int32)
    config = gradients.configs_of(saved, 2, 1)["fp8"]
    initial = Model(config, K, device.device_name())
    initial.initialise(seed=1)
    params = 4 * initial.state.params
    _, ours, dims = gradients.ours(config, params, tokens)
    _, want = gradients.exact(params, dims, tokens)
    found, expected = (
        gradients.by_kind(ours, want),
        gradients.by_kind(gradients_by_rounding(params, dims, tokens), want),
    )
    for kind in found:
        assert expected[kind].error / 1.5 < found[kind].error < 1.5 * expected[kind].error, kind
