"""Llama 3 against transformers, with the same weights: losses, logits
and gradients of odd sizes.
"""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gpt2_triton.checkpoint.weights import by_name
from gpt2_triton.config.config import Config
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.distributed.control import SINGLE_PROCESS
from gpt2_triton.model.llama import rope
from gpt2_triton.model.muon import matrix_shapes
from gpt2_triton.model.tensor_stats import format_summary
from tests.model.test_lifetimes import poison, recorded_step, violations
from tests.model.test_muon import MUON, muon_step
from tests.support import torch_reference
from tests.support.helpers import error, max_error
from tests.support.models import (
    batches,
    exact_model,
    kernel_model,
    leaves_of,
    require_decoding_equals_the_forward,
    require_gradients,
    train_steps,
)
from tests.support.tiny import tiny_config

# heads, heads of k and v, their size, factor, tied, channels if not as many as the heads' columns
SIZES = [
    (4, 4, 64, 1.0, True, None),
    (4, 2, 64, 8.0, False, None),
    (9, 3, 64, 1.0, True, None),
    (2, 1, 128, 32.0, False, None),
    (3, 1, 64, 1.0, False, 96),
    (2, 1, 64, 8.0, True, 176),
]
WIDTHS = [None, 112]  # of 4 heads of 64
TRAIN = dict(batch_size=2, seq_len=8, total_batch_tokens=16)


def llama(NH=4, NKV=2, HS=64, factor=8.0, tied=True, C=None, **more) -> dict:
    """Return the sections of a Llama whose sizes are no powers of 2; with C
    channels its heads have model.head_dim HS.
    """
    sizes = dict(
        n_layer=2,
        n_head=NH,
        n_kv_head=NKV,
        head_dim=C and HS,
        n_embd=C or NH * HS,
        n_inner=272 if C else 176,  # as wide as datt, which lies in dfcg, or not
        vocab_size=300,
        block_size=32,
    )
    model = sizes | dict(arch="llama", norm_eps=1e-6, rope_factor=factor, tied=tied)
    return dict(model=model, train=TRAIN) | more


def theirs(config: Config) -> LlamaForCausalLM:
    m = config.model
    scaling = dict(
        rope_type="llama3", factor=m.rope_factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    sizes = dict(
        vocab_size=m.vocab_size, hidden_size=m.n_embd, intermediate_size=m.inner,
        head_dim=m.head_size,
        num_hidden_layers=m.n_layer, num_attention_heads=m.n_head, num_key_value_heads=m.n_kv_head,
        max_position_embeddings=m.block_size,
    )  # fmt: skip
    rotation = (scaling if m.rope_factor > 1 else dict(rope_type="default")) | dict(
        rope_theta=m.rope_theta
    )
    numbers = dict(rms_norm_eps=m.norm_eps, tie_word_embeddings=m.tied, rope_parameters=rotation)
    return LlamaForCausalLM(LlamaConfig(**sizes, **numbers, attn_implementation="eager"))


@pytest.mark.parametrize("NH,NKV,HS,factor,tied,C", SIZES)
def test_loss_logits_and_gradients_equal_transformers(NH, NKV, HS, factor, tied, C):
    """In fp32, which transformers' norms and softmax use in any dtype, with
    weights of a model's usual size.
    """
    model = kernel_model(**llama(NH, NKV, HS, factor, tied, C, sample=dict(every=1)))
    model.initialise(seed=1)
    lnw = model.train_view.w.lnw
    lnw.add_(
        0.2 * torch.randn(lnw.shape, generator=torch.Generator().manual_seed(0)).to(lnw.device)
    )
    reference, (ids, targets) = theirs(model.config), batches(model.config, 1)[0]
    weights = by_name(model.state.params, model.config.model)
    assert (
        reference.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"] * tied
    )
    logits, flat = reference(ids.long()).logits, targets.flatten().long()
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), flat, ignore_index=-1, reduction="sum"
    ) / len(flat)
    want.backward()
    assert error(torch.from_numpy(model.logits(ids.numpy(), 0, 8)), logits.detach()) < 1e-5
    [(loss, _, _)] = train_steps(model, 1)
    assert abs(loss - want.item()) < 1e-6 * loss
    grads = {name: p.grad for name, p in reference.named_parameters()}
    for name, got in by_name(model.state.grads, model.config.model).items():
        assert error(got.cpu(), grads[name]) < 1e-5, name


@pytest.mark.parametrize("C", WIDTHS)
@pytest.mark.parametrize("level", (*RECOMPUTE_LEVELS, "gelu:1", "block:1"))
def test_loss_and_gradients_equal_autograd(level, C):
    """The reference launchers in float64, at each recompute level, in two micro-steps.  In an
    arena of NaN the first one clears the gradient of wte, which an untied head leaves alone.
    """
    two = TRAIN | dict(total_batch_tokens=32)
    require_autograd_s_step(
        exact_model(level, **llama(tied=level != "none", C=C) | dict(train=two))
    )


def require_autograd_s_step(model):
    """Compare the loss and the gradients of a step with autograd's."""
    params = leaves_of(model)
    words = 300, model.dims["NH"], model.train_view.a.rope, 1e-6
    micro_batches = batches(model.config, model.shape.accumulation)
    cap = model.config.model.logit_cap
    losses = [
        torch_reference.llama_loss(params, *batch, *words, cap=cap) for batch in micro_batches
    ]
    want = torch.stack(losses).mean()
    want.backward()
    train_steps(model, 1)
    assert max_error(model.state.step_out[0], want.detach()) < 1e-12
    require_gradients(model, params)


@pytest.mark.parametrize(
    "level,tied,C",
    [
        ("none", True, None),
        ("gelu+ln+qkv", False, None),
        ("block", True, None),
        ("none", True, 112),
    ],
)
def test_decoding_equals_the_training_forward(level, tied, C):
    require_decoding_equals_the_forward(
        exact_model(level, **llama(tied=tied, C=C), sample=dict(every=1))
    )


@pytest.mark.parametrize(
    "HS,theta,factor", [(64, 1e4, 1), (64, 5e5, 8), (64, 5e5, 32), (128, 5e5, 1), (128, 5e5, 8)]
)
def test_rotations_equal_transformers_to_the_last_bit_of_a_frequency(HS, theta, factor):
    config = tiny_config(**llama(4, 4, HS, factor)).replace(
        model=dict(rope_theta=theta, block_size=8192)
    )
    embedding = theirs(config).model.rotary_emb
    assert isinstance(embedding, LlamaRotaryEmbedding)
    assert np.array_equal(rope.frequencies(HS, theta, factor), embedding.inv_freq.numpy())
    cos, sin = embedding(torch.zeros(1), torch.arange(8192)[None])
    got = torch.from_numpy(rope.table(8192, HS, theta, factor))
    assert (got - torch.cat([cos[0, :, : HS // 2], sin[0, :, : HS // 2]], 1)).abs().max() < 1e-7


@pytest.mark.parametrize("C", WIDTHS)
def test_an_update_by_muon_takes_q_k_v_gate_and_value_apart(C):
    model = exact_model(**llama(C=C), optim=MUON)
    C, F = model.config.model.n_embd, model.config.model.inner
    assert matrix_shapes(model.A.Params, model.dims) == [
        (256, C, 1), (128, C, 2), (C, 256, 1), (F, C, 2), (C, F, 1),
    ]  # fmt: skip
    weights = {
        name: w.clone() for name, w in by_name(model.state.params, model.config.model).items()
    }
    train_steps(model, 1)
    factor = model.state.step_out[2]
    grads, now = (by_name(t, model.config.model) for t in (model.state.grads, model.state.params))
    for name, w in weights.items():
        if "_proj" in name:
            w.grad = grads[name] * factor
            muon_step([w], [torch.zeros_like(w)], model.config.optim.lr, model.config.weight_decay)
            assert max_error(now[name], w) < 1e-6, name


def test_statistics_name_the_parts_of_a_layer_and_an_untied_head():
    model = kernel_model(**llama(tied=False, log=dict(stats_every=1)))
    model.initialise(seed=1)
    for name in ("wte", "lmhead"):
        padded = getattr(model.train_view.w, name)
        assert (padded[:300] != 0).all() and (padded[300:] == 0).all()
    train_steps(model, 1, with_stats=True)
    record = model.stats_recorder.read(
        [t.cpu() for t in model.stats_recorder.buffers], 1, SINGLE_PROCESS
    )
    assert [*record["activations"]] == ["x", "qkv", "att", "fch", "dx"]
    assert [*record["parameters"]] == ["wte", "lmhead", "qkvw", "attprojw", "fcw", "fcprojw", "lnw"]
    assert len(record["parameters"]["lmhead"]["weight_rms"]) == 1
    # without padding
    weights = {name: columns["weight_rms"][0] for name, columns in record["parameters"].items()}
    assert weights["lmhead"] == pytest.approx(0.02, rel=0.02)
    residual = 0.02 / (2 * model.dims["L"]) ** 0.5
    for name in ("attprojw", "fcprojw"):
        assert weights[name] == pytest.approx(residual, rel=0.02)
    gate_and_value = model.train_view.g.fcw[1].square().mean().sqrt().item()
    assert record["parameters"]["fcw"]["grad_rms"][1] == pytest.approx(gate_and_value, rel=1e-4)
    assert "largest activation" in format_summary(record)


@pytest.mark.parametrize("level", (*RECOMPUTE_LEVELS, "gelu:1", "block:1"))
def test_every_launch_stays_inside_live_buffers(level, monkeypatch):
    C = 112 if level in ("gelu", "block:1") else None
    model, launches = recorded_step(level, monkeypatch, **llama(tied=level != "none", C=C))
    assert len(launches) > 40 and violations(model, launches) == []


@pytest.mark.parametrize("C", WIDTHS)
def test_nan_in_dead_buffers_changes_no_bit(C, monkeypatch):
    right = train_steps(exact_model("gelu", **llama(C=C)), 2)
    assert train_steps(poison(exact_model("gelu", **llama(C=C)), monkeypatch), 2) == right
