"""Qwen3 in Hugging Face's format: its logits, and every bit there and back."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from gpt2_triton.checkpoint import huggingface, huggingface_llama
from gpt2_triton.checkpoint.weights import to_flat_buffers
from gpt2_triton.config.config import Config
from gpt2_triton.errors import CheckpointError
from tests.support.helpers import error
from tests.support.json_files import edit_json
from tests.support.models import batches, kernel_model

# heads with 192 columns over 96 channels; a padded vocabulary
SIZES = dict(
    vocab_size=350,
    hidden_size=96,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=32,
    rope_theta=1e6,
    bos_token_id=0,
    eos_token_id=2,
)
# of config.json of Qwen/Qwen3-0.6B-Base; 1.7B's differs in the second
PUBLISHED = dict(
    model_type="qwen3",
    attention_bias=False,
    head_dim=128,
    hidden_act="silu",
    hidden_size=1024,
    intermediate_size=3072,
    max_position_embeddings=32768,
    max_window_layers=28,
    num_attention_heads=16,
    num_hidden_layers=28,
    num_key_value_heads=8,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
    vocab_size=151936,
)
WIDER = dict(hidden_size=2048, intermediate_size=6144)


def saved(folder: Path, dtype: torch.dtype = torch.float32, **more) -> Qwen3ForCausalLM:
    """Write a Qwen3 of random weights, which differ in every norm, by transformers."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | more, attn_implementation="eager"))
    for p in model.parameters():
        p.data = (torch.randn(p.shape) * 0.1 + (p.dim() == 1)).to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_transformers(tmp_path, tied):
    theirs = saved(tmp_path / "theirs", tie_word_embeddings=tied)
    found = huggingface.read(str(tmp_path / "theirs"))
    model = kernel_model(model=found.model.model_dump(), sample=dict(every=1))
    model.state.params.copy_(to_flat_buffers(found, model.config)["params"])
    [(ids, _)] = batches(model.config, 1)
    want = theirs(ids.long()).logits.detach()
    T = model.config.train.seq_len
    assert error(torch.from_numpy(model.logits(ids.numpy(), 0, T)), want) < 1e-5


@pytest.mark.parametrize("size, sizes", [("qwen3:0.6b", {}), ("qwen3:1.7b", WIDER)])
def test_a_published_model_has_the_size_of_its_name(size, sizes):
    """transformers counts 596,049,920 and 1,720,574,976 parameters."""
    config = Config.model_validate(dict(model=dict(size=size)))
    found = huggingface_llama.model(Path("config.json"), PUBLISHED | sizes)
    assert found == config.model
    assert config.n_params == (1_720_574_976 if sizes else 596_049_920)


def test_heads_have_128_columns_where_the_configuration_does_not_say(tmp_path):
    saved(tmp_path, head_dim=128)
    edit_json(tmp_path / "config.json", head_dim=...)
    assert huggingface.read(str(tmp_path)).model.head_dim == 128


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(use_sliding_window=True), "use_sliding_window is True, and only False is supported"),
        (dict(rope_parameters=None, rope_scaling=YARN), "rope_type is 'yarn', and only"),
        (dict(attention_bias=True), "attention_bias is True, and only False is supported"),
        (dict(model_type="qwen2"), "model_type is 'qwen2', and only 'gpt2' or 'llama' or 'qwen3'"),
        (dict(model_type="llama"), "k_norm.weight is no part of a Llama of 2 layers"),
    ],
)
def test_what_is_computed_otherwise_is_refused_in_a_line(tmp_path, change, named):
    saved(tmp_path)
    edit_json(tmp_path / "config.json", **change)
    with pytest.raises(CheckpointError, match=named) as caught:
        huggingface.read(str(tmp_path))
    assert "\n" not in str(caught.value)
