"""benchmarks/losses/torch_train.py: attention on a CPU, and the optimizers;
test_vs_torch.py trains with it.
"""

import pytest
import torch

from benchmarks.losses import torch_train
from gpt2_triton.config.config import Config
from gpt2_triton.errors import ConfigError
from gpt2_triton.model import architecture
from gpt2_triton.model.tables import param_views


def test_an_optimizer_that_pytorch_s_run_has_not_is_refused():
    config = Config.load("configs/quickstart.yaml", {}).replace(optim={"name": "lion"})
    with pytest.raises(ConfigError, match="lion"):
        torch_train.optimizers_of(torch_train.GPT2(config.model), config)


def test_muon_updates_q_k_and_v_apart_and_adamw_the_rest():
    """A large gradient of q leaves k's and v's updates their size: each has
    the rms 0.2 at a rate of 1.
    """
    keys = {
        "model.n_embd": 64,
        "model.n_head": 1,
        "model.n_layer": 1,
        "optim.name": "muon",
        "optim.tau": 0,
    }
    rates = {"optim.lr": 1.0, "optim.adamw_lr": 0.5, "optim.embed_lr": 4.0, "optim.embed_decay": 0}
    config = Config.load(
        "configs/quickstart.yaml", {key: str(value) for key, value in (keys | rates).items()}
    )
    model = torch_train.GPT2(config.model)
    muon, adamw = torch_train.optimizers_of(model, config)
    groups = [
        (group["factor"], group["weight_decay"]) for group in muon.param_groups + adamw.param_groups
    ]
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
    layer = {name: moved[f"layers.0.{name}.weight"] for name in ("qkv", "attproj", "fc", "fcproj")}
    thirds = layer.pop("qkv").chunk(3)
    assert [x.mean().sqrt().item() for x in (*thirds, *layer.values())] == pytest.approx(
        [0.2] * 6, 0.2
    )
    assert moved["wte.weight"].mean().sqrt().item() == pytest.approx(2.0, 1e-3)
    assert moved["ln_f.bias"].mean().sqrt().item() == pytest.approx(0.5, 1e-3)


@pytest.mark.parametrize(
    "more",
    [{}, {"model.qk_norm": "true", "model.head_dim": "128"}, {"model.tied": "false"}],
)
def test_our_weights_have_the_names_and_shapes_of_pytorch_s(more):
    keys = {"model.arch": "llama", "model.n_embd": "64", "model.n_head": "1", "model.n_layer": "2"}
    m = Config.load("configs/quickstart.yaml", keys | more).model
    dims = architecture.dimensions(m)
    params = param_views(architecture.of(m).Params, torch.empty(dims["N"], device="meta"), dims)
    ours = {name: p.shape for name, p in torch_train.by_name(params).items()}
    assert ours == {name: p.shape for name, p in torch_train.model_of(m).named_parameters()}


def test_muon_updates_llama_s_gate_and_value_apart():
    keys = {"model.arch": "llama", "model.n_embd": "64", "model.n_head": "1", "model.n_layer": "1"}
    keys |= {"optim.name": "muon", "train.total_batch_tokens": "null"}
    config = Config.load("configs/quickstart.yaml", keys)
    muon, _ = torch_train.optimizers_of(torch_train.model_of(config.model), config)
    m, matrices = config.model, muon.param_groups[0]["params"]
    layer = [64, 64, 64, 64, m.inner, m.inner, 64]  # q, k, v, attproj, gate, value, fcproj
    assert [len(matrix) for matrix in matrices] == layer


def test_a_cap_bounds_the_logits_and_keeps_small_ones():
    keys = {"model.arch": "llama", "model.n_embd": "64", "model.n_head": "1", "model.n_layer": "1"}
    m = Config.load("configs/quickstart.yaml", keys).model
    model, capped = torch_train.model_of(m), torch_train.model_of(m, cap=2.0)
    capped.load_state_dict(model.state_dict())
    x = torch.linspace(-1, 1, m.n_embd) * torch.tensor([[1e-3], [1e3]])
    small, large = capped.head(x)
    assert torch.allclose(small, model.head(x)[0], rtol=1e-4)
    assert large.abs().max() == 2 and model.head(x)[1].abs().max() > 2


def test_an_untied_head_takes_the_embedding_s_rate():
    keys = {"model.arch": "llama", "model.n_embd": "64", "model.n_head": "1", "model.n_layer": "1"}
    keys |= {"optim.name": "muon", "optim.adamw_lr": "5e-4", "optim.embed_lr": "2"}
    keys |= {"optim.lr": "1e-3", "model.tied": "false", "train.total_batch_tokens": "null"}
    config = Config.load("configs/quickstart.yaml", keys)
    model = torch_train.model_of(config.model)
    _, adamw = torch_train.optimizers_of(model, config)
    embeddings = adamw.param_groups[0]
    assert embeddings["factor"] == 1 and model.head.weight is not model.wte.weight
    assert any(p is model.head.weight for p in embeddings["params"])
