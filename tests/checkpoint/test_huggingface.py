"""Hugging Face's GPT-2: transformers computes our logits, round trips keep every bit, other
models are refused in one line.
"""

import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from gpt2_triton.checkpoint import huggingface
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.weights import Weights, by_name, check_sizes, to_flat_buffers
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.errors import CheckpointError
from tests.support.foreign import checkpoint_of, config_of, random_params
from tests.support.json_files import edit_json
from tests.support.tiny import tiny_config, tiny_model

transformers = pytest.importorskip("transformers")

SIZES = [
    dict(n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16),
    dict(n_layer=1, n_head=2, n_embd=160, vocab_size=256, block_size=24, seq_len=24),
    dict(n_layer=3, n_head=2, n_embd=128, vocab_size=257, block_size=16),
]
TOLERANCE = 1e-4  # logits are about 10; two orders of summation in fp32 are 1e-5 apart


def their_model(
    n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16, seq_len=None, **keys
):
    """Return a GPT-2 of transformers with random biases and norms, since it
    starts with zeros and ones.
    """
    config = transformers.GPT2Config(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=vocab_size,
        n_positions=block_size, bos_token_id=0, eos_token_id=0, **keys,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of their_model() as written by transformers."""
    directory = tmp_path_factory.mktemp("theirs")
    their_model().save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def edit_tensors(directory, edit):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def imported(directory, **sections):
    """Return our flat parameters from a directory of Hugging Face."""
    return to_flat_buffers(huggingface.read(str(directory)), config_of(**sections))["params"]


def require_refused(message, directory, **sections):
    """Require an error of one line at an import."""
    with pytest.raises(CheckpointError, match=message) as error:
        imported(directory, **sections)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sizes, act", [*((sizes, "gelu") for sizes in SIZES), (SIZES[0], "relu2")])
def test_exported_weights_give_our_logits_in_transformers(tmp_path, sizes, act):
    config = config_of(**sizes, dropout=0.1).replace(model={"activation": act})
    params, T = random_params(config), config.train.seq_len
    ids = np.random.default_rng(0).integers(0, config.model.vocab_size, (1, T), dtype=np.int32)
    export(
        str(checkpoint_of(tmp_path / "run", config, {"params": params})),
        tmp_path / "out",
        "hf",
        "fp32",
    )
    model, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert [model.config.embd_pdrop, model.config.resid_pdrop, model.config.attn_pdrop] == [
        0.1,
        0.1,
        0,
    ]
    with torch.no_grad():
        theirs = model.eval()(torch.from_numpy(ids).long()).logits.numpy()
    ours, _ = tiny_model(**config.to_dict() | dict(sample=dict(every=1)))
    ours.state.params.copy_(params)
    assert np.abs(ours.logits(ids, 0, T) - theirs).max() < TOLERANCE
    assert huggingface.read(str(tmp_path / "out")).model.activation == act


def test_a_run_with_masters_keeps_every_bit(saved, tmp_path):
    config = config_of(train=dict(dtype="bf16"), optim=dict(master="fp32"), dropout=0.1)
    step_dir = checkpoint_of(
        tmp_path / "run", config, to_flat_buffers(huggingface.read(str(saved)), config)
    )
    export(str(step_dir), tmp_path / "out", "hf", "fp32")
    before, after = (
        load_file(saved / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_import_rounds_bf16_without_masters_as_torch_does(saved):
    config = config_of(train=dict(dtype="bf16"))
    rounded = to_flat_buffers(huggingface.read(str(saved)), config)
    assert list(rounded) == ["params"]
    assert torch.equal(rounded["params"], imported(saved).bfloat16())


def test_import_zeroes_padding_rows_and_drops_surplus_positions(saved):
    config = config_of(block_size=8, seq_len=8)
    params = imported(saved, block_size=8, seq_len=8)
    theirs = load_file(saved / "model.safetensors")
    assert torch.equal(
        by_name(params, config.model)["wpe.weight"], theirs["transformer.wpe.weight"][:8]
    )
    assert not params[300 * 64 : config.model.padded_vocab * 64].any()


def test_import_takes_older_spellings_of_the_same_model(saved, copy):
    """No prefix, causal masks, a head that repeats wte: older versions of
    transformers and others wrote these.
    """
    expected = imported(saved)

    def without_prefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.bool)
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)

    edit_tensors(copy, without_prefix)
    edit_json(copy / "config.json", tie_word_embeddings=False, layer_norm_epsilon=...)
    assert torch.equal(imported(copy), expected)


def test_import_reads_the_files_of_an_index_as_one_model(saved, tmp_path):
    their_model().save_pretrained(tmp_path, max_shard_size="100KB")
    first, *others = sorted(tmp_path.glob("model-*.safetensors"))
    assert others and torch.equal(imported(tmp_path), imported(saved))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first.name, "weights.safetensors"))
    require_refused("weights.safetensors: .*No such file", tmp_path)
    first.rename(tmp_path / "weights.safetensors")
    save_file({"ema": torch.zeros(1)}, tmp_path / "ema.safetensors")  # in no index
    assert torch.equal(imported(tmp_path), imported(saved))
    index.unlink()  # then they may be of several models
    require_refused(f"no index, and {len(others) + 2} other .safetensors; ", tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_import_of_other_precisions_is_exact(saved, copy, dtype):
    edit_tensors(
        copy, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()})
    )
    assert torch.equal(imported(copy), imported(saved).to(dtype).float())


WRAPPED = [
    ("", f"{prefix}.")
    for prefix in ("module", "_orig_mod", "module._orig_mod", "_orig_mod.module", "model")
]
WRAPPED += [(".attn.", "._orig_mod.attn."), (".mlp.", "._fsdp_wrapped_module.mlp.")]


@pytest.mark.parametrize("part", WRAPPED)
def test_import_takes_names_with_wrappers(saved, copy, part):
    edit_tensors(
        copy, lambda t: [t.update({name.replace(*part, 1): t.pop(name)}) for name in list(t)]
    )
    assert torch.equal(imported(copy), imported(saved))


def test_import_takes_matrices_of_either_order(saved, copy):
    """Those who write GPT-2 with nn.Linear store [out, in]."""
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    edit_tensors(
        copy,
        lambda t: t.update({name: t[name].T.contiguous() for name in t if name.endswith(turned)}),
    )
    assert torch.equal(imported(copy), imported(saved))


def test_import_takes_the_head_for_an_absent_embedding(saved, copy):
    """safetensors.torch.save_model keeps one of the tied pair: the first by name."""
    save_model(transformers.GPT2LMHeadModel.from_pretrained(saved), copy / "model.safetensors")
    assert "transformer.wte.weight" not in load_file(copy / "model.safetensors")
    assert torch.equal(imported(copy), imported(saved))


@pytest.mark.parametrize(
    "kind", ["GPT2ForSequenceClassification", "GPT2ForTokenClassification", "GPT2DoubleHeadsModel"]
)
def test_import_leaves_out_other_heads_and_names_them(tmp_path, capsys, kind):
    config = their_model().config
    config.pad_token_id = 0
    model = getattr(transformers, kind)(config)
    model.save_pretrained(tmp_path)
    wte = by_name(imported(tmp_path), config_of().model)["wte.weight"]
    assert torch.equal(wte, model.transformer.wte.weight)
    heads = sorted(
        name for name in model.state_dict() if not name.startswith(("transformer.", "lm_head."))
    )
    told = (
        f"\nnote: hf:{tmp_path}: tensors of other heads left out "
        f"({len(heads)}): {', '.join(heads)}\n"
    )
    assert heads and capsys.readouterr().err.endswith(told)


def test_pickles_and_adapters_are_refused_with_what_to_do(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    require_refused("and 0 other .safetensors; .*snapshots.* convert a .bin by save_pre", copy)
    save_file(
        {"base_model.model.lora_A.weight": torch.zeros(1)}, copy / "adapter_model.safetensors"
    )
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    require_refused("is a LoRA adapter; merge it .*merge_and_unload", copy)


REFUSED_CONFIGS = [
    (
        dict(activation_function="gelu", scale_attn_by_inverse_layer_idx=True),
        "activation_function is 'gelu', and only 'gelu_new' or .* is supported; "
        "scale_attn_by_inverse_layer_idx is True, and only False is supported$",
    ),
    (
        dict(model_type="mistral", n_inner=100, quantization_config=dict(quant_method="gptq")),
        "model_type is 'mistral', and only 'gpt2' or 'llama' or 'qwen3' is supported; "
        "n_inner is 100, and only None or 256 is supported$",
    ),
    (dict(model_type="llama"), "has no num_hidden_layers"),
    (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
    (dict(n_embd=None), "not a model that fits here: n_layer 2, n_head 1, n_embd None"),
    (dict(n_embd=63), "not a model that fits here: n_layer 2, n_head 1, n_embd 63"),
    (
        dict(n_layer=3),
        "has no tensor h.2.attn.c_attn.bias, a part of a GPT-2 of 3 "
        "layers; correct its configuration",
    ),
    (
        dict(n_layer=1),
        "h.1.attn.c_attn.bias is no part of a GPT-2 of 1 layers; correct its configuration",
    ),
    (
        dict(vocab_size=299),
        r"wte.weight is torch.float32 \(300, 64\), expected floating-point numbers \(299, 64\)",
    ),
    (
        dict(tie_word_embeddings=False),
        "has no tensor lm_head.weight, a part of a GPT-2 of 2 layers; .* save the whole",
    ),
    (
        dict(quantization_config=dict(quant_method="gptq")),
        r"config.json: the weights are quantized; take the",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED_CONFIGS)
def test_import_refuses_other_models(copy, keys, message):
    edit_json(copy / "config.json", **keys)
    require_refused(message, copy, vocab_size=keys.get("vocab_size", 300))


REFUSED_TENSORS = [
    (
        lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}),
        "its output head is not",
    ),
    (
        lambda t: t.pop("transformer.h.1.ln_2.bias"),
        "has no tensor h.1.ln_2.bias, .* or save the whole model",
    ),
    (
        lambda t: t.update({"h.0.attn.c_attn.lora_A.weight": torch.zeros(1)}),
        "lora_A.*, merge its adapters",
    ),
    (
        lambda t: t.update({"ema.weight": torch.zeros(1)}),
        "ema.weight is no part of a GPT-2 of 2 layers; .* take this",
    ),
    (
        lambda t: t.update({"module.wpe.weight": torch.zeros(1)}),
        "has .*wpe.weight and .*wpe.weight; take one of them",
    ),
    (
        lambda t: t["transformer.h.0.ln_1.bias"].fill_(float("nan")),
        "h.0.ln_1.bias has a NaN or an infinity",
    ),
    (
        lambda t: t.update({"transformer.ln_f.bias": t["transformer.ln_f.bias"].char()}),
        "is torch.int8 .* quantized",
    ),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED_TENSORS)
def test_import_refuses_wrong_tensors(copy, edit, message):
    edit_tensors(copy, edit)
    require_refused(message, copy)


def test_import_refuses_damaged_files(copy):
    (copy / "config.json").write_text("{")
    require_refused("config.json: cannot be read", copy)
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    require_refused("download it again .*git lfs pull", copy)


def test_import_into_a_run_of_other_sizes_names_the_keys_to_set(saved):
    require_refused(
        "n_layer 2, vocab_size 300, .* n_layer 1, vocab_size 256; set",
        saved,
        n_layer=1,
        vocab_size=256,
    )
    require_refused("; set model.block_size to 16", saved, block_size=32)


def test_import_of_gpt2s_tokens_into_a_run_of_bytes_names_the_tokenizer_too():
    theirs = Weights(
        "theirs", ModelConfig(n_layer=1, n_head=1, n_embd=64), "gpt2", lambda name, rows: 0
    )
    with pytest.raises(
        CheckpointError, match="model.vocab_size to 50257 and data.tokenizer to gpt2$"
    ):
        check_sizes(theirs, tiny_config())


def test_import_looks_a_name_up_on_the_hub(saved, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(
        hub,
        "snapshot_download",
        lambda name, allow_patterns, **_: saved if name == "a/b" else 1 / 0,
    )
    assert huggingface.read("a/b").model.n_layer == 2
    with pytest.raises(CheckpointError, match="hf:gpt2: .*ZeroDiv"):
        huggingface.read("gpt2")
    with pytest.raises(CheckpointError, match=r"hf:./gpt2: .*config.json"):
        huggingface.read("./gpt2")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="hf:gpt2: .*huggingface_hub"):
        huggingface.read("gpt2")


def test_a_model_that_needs_a_licence_or_a_login_says_so(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    for kind, todo in (
        (
            "GatedRepoError",
            "; accept the licence on its page at huggingface.co, "
            "then log in with `hf auth login`, or",
        ),
        (
            "RepositoryNotFoundError",
            "; check the name; if it is private, log in with `hf auth login`, or set HF_TOKEN",
        ),
        (
            "LocalEntryNotFoundError",
            "; name a directory, try online, or set HF_HOME to another place",
        ),
    ):
        error = getattr(hub.errors, kind)
        failure = error.__new__(error)  # its constructor differs by version
        failure.args = ("401 Client Error.",)
        monkeypatch.setattr(
            hub,
            "snapshot_download",
            lambda *_, failure=failure, **__: (_ for _ in ()).throw(failure),
        )
        with pytest.raises(CheckpointError, match=f"hf:meta/llama: .*401.*{todo}"):
            huggingface.read("meta/llama")
