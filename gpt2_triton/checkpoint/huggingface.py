"""Read and write GPT-2, Llama and Qwen3 in Hugging Face's format: config.json,
safetensors and the tokenizer's files.

The weights are in model.safetensors, or in the files that an index names.  An export of GPT-2 has
a layer's four matrices as [in, out] (Conv1D).  hf_tokenizer.py writes the tokenizer,
state_dict.py finds the tensors.
"""

import dataclasses
import functools
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpt2_triton.checkpoint import hf_tokenizer, huggingface_llama, safetensors_files, source_files
from gpt2_triton.checkpoint.format import read_object
from gpt2_triton.checkpoint.safetensors_files import MODEL
from gpt2_triton.checkpoint.state_dict import CONV1D, find_weights
from gpt2_triton.checkpoint.weights import (
    Weights,
    model_config_from_sizes,
    require_supported,
    round_bf16,
)
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.data.tokenizer import Tokenizer, look_in
from gpt2_triton.errors import CheckpointError, login_advice
from gpt2_triton.files import write_json

# weights, and what source_files.py names
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
INDEX = "*.safetensors.index.json"
ADAPTER = "adapter_config.json"
# our name: the key in config.json
CONFIG_KEYS = {name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size")} | {
    "block_size": "n_positions"
}

ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu2": "relu2",
}  # their name: ours; the first is written

# keys of config.json that change what a model computes, with the values that are
# supported, the default first
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2", *huggingface_llama.CLASSES),
    "activation_function": tuple(ACTIVATIONS),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


# ---- reading ----


def read(name: str) -> Weights:
    """Return the model in a directory, or of this name on the Hub;
    CheckpointError if it cannot run here.
    """
    directory = Path(name) if Path(name).is_dir() else _download(name)
    places: dict[str, Path] = {}
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: not safetensors, or incomplete ({error}); "
                "download it again (in a clone: git lfs pull)"
            ) from None

    @functools.lru_cache(maxsize=1)  # parts of a tensor are read one after the other
    def load(stored: str) -> Tensor:
        with safe_open(places[stored], framework="pt") as file:
            return file.get_tensor(stored)

    path = directory / source_files.CONFIG
    config = read_object(path)
    # a list: a false model_type may have no hash
    is_llama = config.get("model_type") in list(huggingface_llama.CLASSES)
    reader = huggingface_llama.model if is_llama else _model
    model = reader(path, config)
    if config.get("quantization_config"):  # another file of this model can run
        raise CheckpointError(f"{path}: the weights are quantized; take the model that is not")
    tied = config.get("tie_word_embeddings", model.tied)
    weights = find_weights(f"hf:{name}", model, places, load, tied=tied)
    tokenizer = hf_tokenizer.tokenizer_in(directory, model)
    look_in(tokenizer or "", directory)
    return dataclasses.replace(weights, tokenizer=tokenizer, beside=directory)


def _download(name: str) -> Path:
    """Return the directory of a model on the Hub, from huggingface_hub's cache or the network."""
    if name.startswith((".", "/", "~")) or Path(name).exists():
        raise CheckpointError(
            f"hf:{name}: no such directory; expected one with config.json and {MODEL}"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # of the import, the Hub, the network or the disk
        todo = (
            login_advice(error) or "name a directory, try online, or set HF_HOME to another place"
        )
        raise CheckpointError(
            f"hf:{name}: no such directory, and the download failed ({type(error).__name__}: "
            f"{textwrap.shorten(str(error), 120, placeholder=' ...')}); {todo}"
        ) from error


def _weight_files(directory: Path) -> list[Path]:
    """Return model.safetensors, else an index's files, else the only file; or CheckpointError."""
    if (directory / MODEL).is_file():
        return [directory / MODEL]
    indices = sorted(directory.glob(INDEX))
    if indices:
        files_of = read_object(indices[0]).get("weight_map", {})
        return [directory / Path(part).name for part in sorted(set(files_of.values()))]
    if (directory / ADAPTER).is_file():
        raise CheckpointError(
            f"{directory}: is a LoRA adapter; "
            "merge it (peft's merge_and_unload), and save the model"
        )
    files = [*directory.glob("*.safetensors")]
    if len(files) != 1:
        raise CheckpointError(
            f"{directory}: has no {MODEL}, no index, and {len(files)} other .safetensors; "
            "name the directory of one (in a Hub cache: snapshots/COMMIT), "
            "or convert a .bin by save_pretrained"
        )
    return files


def _model(path: Path, config: dict[str, Any]) -> ModelConfig:
    """Return the sizes in config.json; CheckpointError for a model that computes something else."""
    inner = 4 * (config.get("n_embd") or 0)
    require_supported(path, config, REQUIRED | {"n_inner": (None, inner)})
    sizes = {ours: config.get(theirs) for ours, theirs in CONFIG_KEYS.items()}
    activation = ACTIVATIONS[config.get("activation_function", "gelu_new")]
    return model_config_from_sizes(str(path), **sizes, activation=activation)


# ---- writing ----


def write(weights: Weights, directory: Path, dtype: str, tokenizer: Tokenizer | None) -> int:
    """Write configuration, weights in dtype "fp32" or "bf16", and the source's
    tokenizer, else the given one.

    Return the number of tokens that have a text.
    """
    ids = source_files.ids(weights.beside)
    if tokenizer:
        begin = tokenizer.begin or tokenizer.delimiter
        ids = {"bos_token_id": begin, "eos_token_id": tokenizer.eot} | ids
    write_json(directory / source_files.CONFIG, config_of(weights.model, dtype) | ids)
    write_json(directory / source_files.GENERATION, {"_from_model_config": True} | ids)
    prefix = "" if weights.model.arch == "llama" else "transformer."
    shapes = {
        prefix + k: shape[::-1] if k.endswith(CONV1D) else shape
        for k, shape in weights.shapes.items()
    }

    def read(name: str) -> Tensor:
        values = weights.read(name.removeprefix(prefix))
        if name.endswith(CONV1D):
            values = values.T
        if dtype == "fp32":
            return torch.from_numpy(np.ascontiguousarray(values))
        return torch.from_numpy(round_bf16(values)).view(torch.bfloat16)

    stored = torch.float32 if dtype == "fp32" else torch.bfloat16
    safetensors_files.write(directory, shapes, stored, read)
    if weights.beside:
        source_files.copy(weights.beside, directory)
    if source_files.has_tokenizer(directory):
        return weights.model.vocab_size
    if tokenizer is None:
        return 0
    hf_tokenizer.write(directory, tokenizer, weights.model.block_size)
    return tokenizer.vocab_size


def config_of(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json, with dropout as in training here."""
    stored = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    if model.arch == "llama":
        return huggingface_llama.config(model, stored)
    sizes = {theirs: getattr(model, ours) for ours, theirs in CONFIG_KEYS.items()} | {
        "n_ctx": model.block_size
    }
    computes = {key: allowed[0] for key, allowed in REQUIRED.items()}
    theirs = [name for name, ours in ACTIVATIONS.items() if ours == model.activation]
    computes["activation_function"] = theirs[0]
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": model.dropout, "resid_pdrop": model.dropout}
    rest = {
        "n_inner": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "torch_dtype": stored,
    }
    return {"architectures": ["GPT2LMHeadModel"]} | computes | sizes | dropout | rest
