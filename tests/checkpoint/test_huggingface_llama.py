"""Llama in Hugging Face's format: transformers computes our logits from an export,
and an import has every bit.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from gpt2_triton.checkpoint import huggingface
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.huggingface_llama import SCALING
from gpt2_triton.checkpoint.weights import to_flat_buffers
from gpt2_triton.errors import CheckpointError, ConfigError
from tests.support.foreign import weights_of
from tests.support.helpers import error
from tests.support.json_files import edit_json, read_json
from tests.support.models import batches, kernel_model

SIZES = dict(
    arch="llama",
    n_layer=2,
    n_head=3,
    n_kv_head=1,
    n_embd=192,
    n_inner=176,
    vocab_size=256,
    block_size=32,
)


def exported(tmp_path, **more):
    model = kernel_model(model=SIZES | more, sample=dict(every=1))
    model.initialise(seed=1)
    weights = weights_of(model)
    export(weights, tmp_path / "out", "hf", "fp32")
    return model, weights, tmp_path / "out"


WIDE = dict(head_dim=64, n_embd=96)  # 192 columns of q


@pytest.mark.parametrize("sizes", [dict(), dict(rope_factor=32.0, tied=False), WIDE])
def test_transformers_computes_our_logits_and_an_import_has_every_bit(tmp_path, sizes):
    model, _, out = exported(tmp_path, norm_eps=1e-6, **sizes)
    [(ids, _)] = batches(model.config, 1)
    theirs = LlamaForCausalLM.from_pretrained(out)(ids.long()).logits.detach()
    T = model.config.train.seq_len
    assert error(torch.from_numpy(model.logits(ids.numpy(), 0, T)), theirs) < 1e-5
    # below it 4.57 and 5.0 warn
    assert read_json(out / "config.json")["transformers_version"] >= "5"
    assert huggingface.read(str(out)).model == model.config.model
    assert is_read(out, model)


def test_an_import_knows_the_sizes_that_null_stands_for(tmp_path):
    model, _, out = exported(tmp_path, n_kv_head=None, n_inner=None)
    assert is_read(out, model)
    with pytest.raises(CheckpointError, match="; set model.n_kv_head to 3"):
        to_flat_buffers(huggingface.read(str(out)), model.config.replace(model=dict(n_kv_head=1)))


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_a_config_of_any_version_of_transformers_gives_the_same_model(tmp_path, factor):
    model, _, out = exported(tmp_path, n_kv_head=None, rope_theta=10_000.0, rope_factor=factor)
    config = read_json(out / "config.json")
    scaling = config.pop("rope_scaling")
    theta = config.pop("rope_theta")
    old = {
        key: value
        for key, value in config.items()
        if key not in ("num_key_value_heads", "head_dim")
    }
    new = (scaling or dict(rope_type="default")) | dict(rope_theta=theta)
    forms = [old | dict(rope_scaling=scaling, rope_theta=theta), config | dict(rope_parameters=new)]
    if factor == 1:
        forms.append(old)  # theta of Llama 1 was not written
    for form in forms:
        (out / "config.json").write_text(json.dumps(form))
        found = huggingface.read(str(out))
        assert (found.model.rope_theta, found.model.rope_factor) == (theta, factor)
        assert torch.equal(to_flat_buffers(found, model.config)["params"], model.state.params.cpu())


NOTE = (
    "note: transformers' {} does not apply final_logit_softcapping 15; greedy text is the "
    "same, for probabilities cap its logits: docs/guide/interop.md\n"
)


@pytest.mark.parametrize("qk_norm, kind", [(False, LlamaForCausalLM), (True, Qwen3ForCausalLM)])
def test_a_cap_is_kept_and_a_note_names_the_class_without_it(tmp_path, capsys, qk_norm, kind):
    model, _, out = exported(tmp_path, logit_cap=15.0, qk_norm=qk_norm)
    assert capsys.readouterr().err == NOTE.format(kind.__name__)
    assert kind.from_pretrained(out).config.final_logit_softcapping == 15
    assert huggingface.read(str(out)).model == model.config.model
    assert is_read(out, model)
    edit_json(out / "config.json", final_logit_softcapping=None)
    uncapped = huggingface.read(str(out))
    assert uncapped.model.logit_cap == 0
    assert "final_logit_softcapping" not in huggingface.config_of(uncapped.model, "fp32")


def edit(out, change):
    """Replace the tensors in `out` by those that `change` makes of them."""
    save_file(change(load_file(out / "model.safetensors")), out / "model.safetensors")


def is_read(out, model):
    return torch.equal(
        to_flat_buffers(huggingface.read(str(out)), model.config)["params"],
        model.state.params.cpu(),
    )


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SPELLINGS = {
    "a repeated head": lambda t: t | {HEAD: t[EMBEDDING].clone()},
    # as save_model keeps
    "the head alone": lambda t: {HEAD if name == EMBEDDING else name: t[name] for name in t},
    "torch.compile": lambda t: {f"_orig_mod.{name}": t[name] for name in t},
    "DDP": lambda t: {f"module.{name}": t[name] for name in t},
    "LlamaModel": lambda t: {name.removeprefix("model."): t[name] for name in t},
    "rotations": lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32)},
}


@pytest.mark.parametrize("change", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_other_spellings_of_a_tied_model_are_the_same(tmp_path, change):
    model, _, out = exported(tmp_path)
    edit(out, change)
    assert is_read(out, model)


def test_a_classifier_beside_the_model_is_left_out_by_name(tmp_path, capsys):
    model, _, out = exported(tmp_path)
    edit(out, lambda t: t | {"score.weight": torch.zeros(2, 192)})
    assert is_read(out, model)
    assert "(1): score.weight\n" in capsys.readouterr().err


def test_a_trained_head_of_a_tied_model_is_used_and_named(tmp_path, capsys):
    """As finetuning with modules_to_save writes it; transformers 5 uses it too."""
    _, _, out = exported(tmp_path)
    head = torch.randn(256, 192, generator=torch.Generator().manual_seed(0))
    edit(out, lambda t: t | {HEAD: head})
    found = huggingface.read(str(out))
    assert (
        not found.model.tied
        and "its output head is not its token embedding, though" in capsys.readouterr().err
    )
    export(found, tmp_path / "again", "hf", "fp32")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[HEAD], head)
    assert not read_json(tmp_path / "again" / "config.json")["tie_word_embeddings"]


ADDED = [
    "layers.0.self_attn.q_proj.bias",
    "layers.1.self_attn.q_proj.lora_A.default.weight",
    "layers.2.mlp.up_proj.weight",
]


@pytest.mark.parametrize("added", ADDED + ["lm_head.bias", "visual.weight"])
def test_no_tensor_is_dropped_without_a_word(tmp_path, added):
    _, _, out = exported(tmp_path)
    edit(out, lambda t: t | {added: torch.zeros(1)})
    with pytest.raises(
        CheckpointError,
        match=f"{added} is .* merge its adapters, or",
    ):
        huggingface.read(str(out))


def test_an_untied_head_may_not_be_missing(tmp_path):
    _, _, out = exported(tmp_path)
    edit_json(out / "config.json", tie_word_embeddings=False)
    with pytest.raises(
        CheckpointError,
        match="lm_head.weight, .* whole model$",
    ):
        huggingface.read(str(out))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path, dtype):
    model, _, out = exported(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    edit(out, lambda t: t | {name: t[name].to(dtype)})
    with pytest.raises(
        CheckpointError,
        match=f"{name} is {dtype} .* not quantized$",
    ):
        to_flat_buffers(huggingface.read(str(out)), model.config)


LINEAR = dict(rope_parameters=None, rope_scaling=dict(type="linear", factor=2.0), mlp_bias=True)
NO_FACTOR = dict(rope_parameters=dict(rope_type="llama3") | SCALING)
OTHER_BANDS = dict(
    rope_parameters=dict(rope_type="llama3", factor=8.0) | SCALING | {"low_freq_factor": 2.0}
)


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(attention_bias=True), "attention_bias"), (dict(head_dim=0), "head_dim"),
        (LINEAR, "mlp_bias is True, .*; rope_type is 'linear', and only 'default' or 'llama3' is"),
        (OTHER_BANDS, "low_freq_factor is 2.0, and only 1.0"), (NO_FACTOR, "rope_factor None"),
        (dict(final_logit_softcapping=-1.0), "logit_cap: Input should be greater"),
        (dict(hidden_size=190), "not a model that fits .* n_embd 190"),
    ],
)  # fmt: skip
def test_other_models_are_refused(tmp_path, change, named):
    _, weights, out = exported(tmp_path)
    edit_json(out / "config.json", **change)
    with pytest.raises(CheckpointError, match=named):
        huggingface.read(str(out))
    with pytest.raises(ConfigError, match="no model.arch llama"):
        export(weights, tmp_path / "llmc", "llmc", "fp32")
