"""Norms of the heads of q and k, and a cap of the logits, in a step of Llama: gradients of
autograd, recomputed bits, decoding, and buffers inside their phases.
"""

import numpy as np
import pytest
import torch

from gpt2_triton.checkpoint.weights import by_name
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.model.rates import bucket_rates
from tests.model.test_lifetimes import recorded_step, violations
from tests.model.test_llama import llama, require_autograd_s_step
from tests.model.test_muon import MUON
from tests.support.models import (
    exact_model,
    kernel_model,
    require_decoding_equals_the_forward,
    require_equal_states,
    train_steps,
)

CAP = 0.5  # logits are as large before training


def normed(NH=4, NKV=2, HS=64, **more) -> dict:
    sections = llama(NH, NKV, HS, **more)
    return sections | dict(model=sections["model"] | dict(qk_norm=True, logit_cap=CAP))


def make_exact(rope: torch.Tensor) -> None:
    """Give rotations the length 1, which cosines and sines in fp32 miss by 1e-8: the backward pass
    rotates back what the forward pass has rotated.
    """
    cos, sin = rope.chunk(2, 1)
    rope.copy_(rope / (cos.square() + sin.square()).sqrt().repeat(1, 2))


@pytest.mark.parametrize("level", (*RECOMPUTE_LEVELS, "gelu+ln+qkv:1", "block:1"))
@pytest.mark.parametrize("NH,NKV,HS,C", [(4, 2, 64, None), (2, 1, 128, 176)])
def test_loss_and_gradients_equal_autograd(NH, NKV, HS, C, level):
    model = exact_model(level, **normed(NH, NKV, HS, C=C))
    make_exact(model.train_view.a.rope)
    require_autograd_s_step(model)


@pytest.mark.parametrize("level", ["none", "gelu+ln+qkv", "block"])
def test_decoding_equals_the_training_forward(level):
    require_decoding_equals_the_forward(exact_model(level, **normed(sample=dict(every=1))))


def test_logits_are_capped():
    sections = normed(sample=dict(every=1))
    plain = sections | dict(model=sections["model"] | dict(logit_cap=0))
    ids = np.arange(8, dtype=np.int32)[None]
    want = exact_model(**plain).logits(ids, 2, 8)
    assert abs(want).max() > CAP
    got = exact_model(**sections).logits(ids, 2, 8)
    assert got == pytest.approx(CAP * np.tanh(want / CAP), rel=1e-5)


@pytest.mark.parametrize("dtype,NKV", [("fp32", 4), ("bf16", 2)])
def test_recomputed_steps_have_the_bits_of_kept_ones(dtype, NKV):
    sections = normed(NKV=NKV, train=dict(batch_size=2, seq_len=8))
    levels = ("none", "gelu+ln+qkv", "block")
    models = [kernel_model(level, dtype, **sections) for level in levels]
    losses = [train_steps(model, 2) for model in models]
    assert losses[0] == losses[1] == losses[2]
    assert np.isfinite([loss for loss, _, _ in losses[0]]).all()
    require_equal_states(*models)


@pytest.mark.parametrize("level", (*RECOMPUTE_LEVELS, "gelu+ln+qkv:1", "block:1"))
def test_every_launch_stays_inside_live_buffers(level, monkeypatch):
    model, launches = recorded_step(level, monkeypatch, **normed())
    assert len(launches) > 40 and violations(model, launches) == []


def test_weights_of_norms_begin_at_1_and_adamw_updates_them_without_decay_beside_muon():
    model = exact_model(**normed(), optim=MUON)
    model.initialise(seed=1)
    weights = model.train_view.w.qknormw
    assert weights.shape == (2, 2, 64) and (weights == 1).all()
    train_steps(model, 1)
    assert (weights != 1).all()
    *_, rest = bucket_rates(model.config)
    assert (rest.optimizer, rest.decay) == ("adamw", 0.0)
    d = model.dims
    assert d["N"] - d["Ne"] - 2 * d["Nl"] == 2 * 2 * 64 + 5 * 256


def test_names_and_the_number_of_parameters():
    model = exact_model(**normed())
    named = by_name(model.state.params, model.config.model)
    q, k = (named[f"model.layers.1.self_attn.{x}_norm.weight"] for x in "qk")
    assert torch.equal(torch.stack([q, k]), model.train_view.w.qknormw[1])
    assert model.config.n_params == model.dims["N"] == len(model.state.params)
