"""benchmarks/losses/torch_train.py: the optimizers and the cap; test_vs_torch.py trains with it."""

import pytest
import torch

from benchmarks.losses.torch_train import model_of, optimizers_of
from gpt2_triton.config.config import Config
from gpt2_triton.errors import ConfigError


def config_of(**optim):
    model = dict(n_embd=64, n_head=1, n_layer=1)
    return Config.load("configs/quickstart.yaml", {}).replace(model=model, optim=optim)


def llama_of(**more):
    keys = {"model.arch": "llama", "model.n_embd": 64, "model.n_head": 1, "model.n_layer": 1}
    keys |= {"optim.name": "muon", "train.total_batch_tokens": None, **more}
    return Config.load("configs/quickstart.yaml", keys)


def test_an_optimizer_that_pytorch_s_run_has_not_is_refused():
    config = config_of(name="lion")
    with pytest.raises(ConfigError, match="lion"):
        optimizers_of(model_of(config.model), config)


def test_muon_updates_q_k_and_v_apart_and_adamw_the_rest():
    """A large gradient of q leaves k's and v's updates their size: each has
    the rms 0.2 at a rate of 1.
    """
    rates = dict(lr=1.0, adamw_lr=0.5, embed_lr=4.0, embed_decay=0, tau=0)
    config = config_of(name="muon", **rates)
    model = model_of(config.model)
    muon, adamw = optimizers_of(model, config)
    groups = [(g["factor"], g["weight_decay"]) for g in muon.param_groups + adamw.param_groups]
    assert groups == [(1.0, 0.0), (2.0, 0.0), (0.5, 0.0)]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    weights["layers.0.qkv.weight"][:64] *= 1e3
    sum((p * weights[name]).sum() for name, p in model.named_parameters()).backward()
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["lr"] = group["factor"]
        optimizer.step()
    moved = {name: (p.detach() - before[name]).square() for name, p in model.named_parameters()}
    q_k_v = moved["layers.0.qkv.weight"].chunk(3)
    others = [moved[f"layers.0.{name}.weight"] for name in ("attproj", "fc", "fcproj")]
    sizes = [x.mean().sqrt().item() for x in (*q_k_v, *others)]
    assert sizes == pytest.approx([0.2] * 6, 0.2)
    assert moved["wte.weight"].mean().sqrt().item() == pytest.approx(2.0, 1e-3)
    assert moved["ln_f.bias"].mean().sqrt().item() == pytest.approx(0.5, 1e-3)


def test_muon_updates_llama_s_gate_and_value_apart():
    config = llama_of()
    muon, _ = optimizers_of(model_of(config.model), config)
    m, matrices = config.model, muon.param_groups[0]["params"]
    layer = [64, 64, 64, 64, m.inner, m.inner, 64]  # q, k, v, attproj, gate, value, fcproj
    assert [len(matrix) for matrix in matrices] == layer


def test_a_cap_bounds_the_logits_and_keeps_small_ones():
    models = [model_of(llama_of(**{"model.logit_cap": cap}).model) for cap in (0, 2)]
    models[1].load_state_dict(models[0].state_dict())
    rows = torch.linspace(-1, 1, 64) * torch.tensor([[1e-3], [1e3]])
    (small, large), capped = (model.logits(rows) for model in models)
    assert torch.allclose(capped[0], small, rtol=1e-4)
    assert capped[1].abs().max() == 2 and large.abs().max() > 2


def test_an_untied_head_takes_the_embedding_s_rate():
    rates = {"optim.lr": 1e-3, "optim.adamw_lr": 5e-4, "optim.embed_lr": 2}
    config = llama_of(**rates, **{"model.tied": False})
    model = model_of(config.model)
    _, adamw = optimizers_of(model, config)
    embeddings = adamw.param_groups[0]
    assert embeddings["factor"] == 1 and model.head.weight is not model.wte.weight
    assert any(p is model.head.weight for p in embeddings["params"])
