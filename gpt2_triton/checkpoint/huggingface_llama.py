"""config.json of a Llama or a Qwen3 in Hugging Face's format, in both directions; huggingface.py
reads and writes the files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt2_triton.checkpoint.weights import model_config_from_sizes, require_supported
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.console import print_line
from gpt2_triton.errors import CheckpointError

# our name: the key in config.json
KEYS = {
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size", "n_inner": "intermediate_size",
    "vocab_size": "vocab_size", "block_size": "max_position_embeddings", "norm_eps": "rms_norm_eps",
}  # fmt: skip
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # by model_type
CAP = "final_logit_softcapping"  # Gemma 2's key, which transformers' CLASSES do not read
# keys that change what a model computes, with the supported value, also the default
REQUIRED = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
}
QWEN3_HEAD_DIM = 128  # where config.json does not say
SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def model(path: Path, config: Mapping[str, Any]) -> ModelConfig:
    """Return the model of config.json at `path`; CheckpointError if it cannot run here."""
    config = {KEYS["n_kv_head"]: None} | dict(config)  # Llama 1 has as many as heads, and no key
    absent = [key for key in KEYS.values() if key not in config]
    if absent:
        raise CheckpointError(f"{path}: has no {', '.join(absent)}; download it again")
    kind = config["model_type"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # the first since 5.0
    rope_type = rope.get("rope_type", rope.get("type", "default"))  # the latter before 4.43
    is_stretched = rope_type == "llama3"
    given = {key: value for key, value in config.items() if value is not None}
    given |= {"rope_type": rope_type} | {key: rope.get(key) for key in SCALING}
    required = REQUIRED[kind] | (SCALING if is_stretched else {})
    supported = {key: (value,) for key, value in required.items()}
    require_supported(path, given, supported | {"rope_type": ("default", "llama3")})
    sizes = {ours: config[theirs] for ours, theirs in KEYS.items()}
    sizes["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    sizes["rope_factor"] = rope.get("factor") if is_stretched else 1.0
    by_default = config["hidden_size"] // config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = QWEN3_HEAD_DIM if kind == "qwen3" else by_default
    sizes |= {"head_dim": None if head_dim == by_default else head_dim}
    # False without the key, as in transformers
    sizes |= {"tied": bool(config.get("tie_word_embeddings")), "qk_norm": kind == "qwen3"}
    sizes |= {"logit_cap": config.get(CAP) or 0.0}
    return model_config_from_sizes(str(path), arch="llama", **sizes)


def _kind(model: ModelConfig) -> str:
    """Return the model_type of an export."""
    return "qwen3" if model.qk_norm else "llama"


def print_uncapped(model: ModelConfig) -> None:
    """Tell users of an export with a cap that transformers' class computes logits without it."""
    if model.logit_cap:
        print_line(
            f"note: transformers' {CLASSES[_kind(model)]} does not apply {CAP} "
            f"{model.logit_cap:g}; greedy text is the same, for probabilities cap its logits: "
            "docs/guide/interop.md",
            error=True,
        )


def config(model: ModelConfig, stored: str) -> dict[str, Any]:
    """Return the content of config.json, in the form that all versions of transformers read."""
    scaling = {"rope_type": "llama3", "factor": model.rope_factor} | SCALING
    sizes = {theirs: getattr(model, ours) for ours, theirs in KEYS.items()}
    sizes |= {
        "num_key_value_heads": model.n_kv_head or model.n_head,
        "head_dim": model.head_size,
        "intermediate_size": model.inner,
    }
    rope = {
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling if model.rope_factor > 1 else None,
    }
    cap = {CAP: model.logit_cap} if model.logit_cap else {}
    kind = _kind(model)
    named = {"architectures": [CLASSES[kind]], "model_type": kind, "torch_dtype": stored}
    # without it 4.57 and 5.0 warn of Mistral's old pattern
    named |= {"transformers_version": "5.0.0"}
    return (
        named
        | sizes
        | rope
        | cap
        | REQUIRED[kind]
        | {"tie_word_embeddings": model.tied, "initializer_range": 0.02}
    )
