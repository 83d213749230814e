"""Weights of each project, as its own program writes them: an import and an export keep every bit,
and the model's sizes.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.sources import open_weights
from gpt2_triton.checkpoint.weights import to_flat_buffers
from tests.checkpoint.test_llmc import file_bytes
from tests.support.foreign import config_of, nanogpt_checkpoint, nanogpt_content, random_params

transformers = pytest.importorskip("transformers")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GPT2 = dict(n_embd=64, n_layer=2, n_head=1, n_positions=16)
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
LLAMA = dict(  # 192 columns of q over 96 channels
    hidden_size=96, intermediate_size=176, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=1, head_dim=64, max_position_embeddings=32,
)  # fmt: skip
MODELS = {
    "GPT2LMHeadModel": GPT2 | NO_DROPOUT,
    "LlamaForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA | dict(tie_word_embeddings=False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_weights_and_keys(tmp_path, name, dtype):
    kind = getattr(transformers, name)
    sizes = MODELS[name] | dict(vocab_size=350, bos_token_id=0, eos_token_id=2)  # a padded one
    model = kind(kind.config_class(**sizes))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape).to(DTYPES[dtype])
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs)
    export(f"hf:{theirs}", ours, "hf", dtype)
    want, got = (load_file(folder / "model.safetensors") for folder in (theirs, ours))
    assert want.keys() == got.keys()
    assert not [name for name in want if want[name].dtype != got[name].dtype]
    assert not [name for name in want if not torch.equal(want[name], got[name])]
    before, after = (kind.from_pretrained(folder).config.to_dict() for folder in (theirs, ours))
    del before["_name_or_path"], before["transformers_version"]
    assert before == {key: after[key] for key in before}


def same(source: str, params: torch.Tensor) -> bool:
    return torch.equal(to_flat_buffers(open_weights(source), config_of())["params"], params.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_llmc_bytes(tmp_path: Path, dtype):
    params = random_params(config_of()).to(DTYPES[dtype])
    theirs = tmp_path / "model.bin"
    theirs.write_bytes(file_bytes(params.float(), config_of(), DTYPES[dtype]))
    assert same(f"llmc:{theirs}", params)
    export(f"llmc:{theirs}", tmp_path / "ours", "llmc", dtype)
    assert (tmp_path / "ours" / "model.bin").read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nanogpt_weights_of_a_compiled_model(tmp_path, dtype):
    """With a causal mask, as older versions saved it; nanoGPT has no export."""
    params = random_params(config_of()).to(DTYPES[dtype])
    content = nanogpt_content(params, "_orig_mod.")
    content["model"]["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    assert same(f"nanogpt:{nanogpt_checkpoint(tmp_path, content)}", params)
