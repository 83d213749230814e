"""Read and write GPT-2 in Hugging Face's format: config.json, model.safetensors and the tokenizer's files.

A model may be in several files, model-00001-of-00002.safetensors and so on.

Tensors have the names of weights.py, with or without the prefix "transformer.".  The four matrices of a layer are
[in, out] there (Conv1D), [out, in] here.  The head is wte; a file may repeat it as lm_head.weight.
"""

import itertools
import json
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt2_triton.checkpoint.weights import Weights, model_config_from_sizes, round_bf16, to_fp32, tokenizer_of
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.data.tokenizer import Tokenizer, byte_spelling
from gpt2_triton.errors import CheckpointError

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # causal masks in older files
MODEL, PARTS = "model.safetensors", "model-*.safetensors"
# our name: the key in config.json
CONFIG_KEYS = {name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size")} | {"block_size": "n_positions"}

# keys of config.json that change what a model computes, with the values that are supported, the default first
REQUIRED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
Places = dict[str, tuple[Path, str]]  # file of each tensor, and its name there, by its name without prefix


# ---- reading ----


def read(name: str) -> Weights:
    """Return the GPT-2 in a directory, or of this name on the hub; CheckpointError if it cannot run here."""
    directory = Path(name) if Path(name).is_dir() else _download(name)
    config = _read_config(directory / "config.json")
    model = model_config_from_sizes(f"hf:{name}", **{ours: config[theirs] for ours, theirs in CONFIG_KEYS.items()})
    places = _find_tensors(directory)

    def tensor(name: str) -> np.ndarray:
        values = _load(*places[name])
        return values.T if name.endswith(CONV1D) else values

    weights = Weights(f"hf:{name}", model, tokenizer_of(model), tensor)
    expected = weights.shapes.keys()
    if missing := sorted(expected - places.keys()):
        raise CheckpointError(f"{directory}: has no tensor {missing[0]}; copy or download it again")
    if unknown := sorted(places.keys() - expected - {"lm_head.weight"}):
        raise CheckpointError(f"{directory}: {unknown[0]} belongs to no GPT-2 of {model.n_layer} layers")
    _check_head(directory, places, tied=config.get("tie_word_embeddings", True))
    return weights


def _download(name: str) -> Path:
    """Return the directory of a model on the hub, from huggingface_hub's cache or the network."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"hf:{name}: no such directory; expected one with config.json and {MODEL}")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=["config.json", MODEL, PARTS]))
    except Exception as error:  # of the import, the hub, the network or the disk
        got = f"{type(error).__name__}: {textwrap.shorten(str(error), 120, placeholder=' ...')}"
        todo = "name a directory, or try online"
        raise CheckpointError(f"hf:{name}: no such directory, and the download failed ({got}); {todo}") from error


def _read_config(path: Path) -> dict[str, Any]:
    """Return config.json; CheckpointError if it describes a model that computes something else."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); expected a GPT-2's") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(config).__name__}")
    for key, allowed in REQUIRED.items():
        if (got := config.get(key, allowed[0])) not in allowed:
            raise CheckpointError(f"{path}: {key} is {got!r}, and only {' or '.join(map(repr, allowed))} is supported")
    for key in CONFIG_KEYS.values():
        if not isinstance(config.get(key), int):
            raise CheckpointError(f"{path}: {key} is {config.get(key)!r}, expected a whole number")
    if config.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise CheckpointError(f"{path}: n_inner is {config['n_inner']}, and only 4 * n_embd is supported")
    return config


def _find_tensors(directory: Path) -> Places:
    """Return the place of each tensor; causal masks are left out."""
    places: Places = {}
    for path in _model_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                places |= {stored.removeprefix("transformer."): (path, stored) for stored in file.keys()}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: not safetensors ({error}); copy or download it again") from None
    return {name: place for name, place in places.items() if not MASKS.fullmatch(name)}


def _model_files(directory: Path) -> list[Path]:
    """Return model.safetensors, else its parts."""
    files = [directory / MODEL] if (directory / MODEL).is_file() else sorted(directory.glob(PARTS))
    if not files:
        raise CheckpointError(f"{directory}: has no {MODEL}; other formats are pickles and are not read")
    return files


def _load(path: Path, stored: str) -> np.ndarray:
    """Return a tensor of a file as fp32."""
    with safe_open(path, framework="pt") as file:
        values = file.get_tensor(stored)
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"{path}: {stored} is {values.dtype}, expected float32, bfloat16 or float16")
    return to_fp32(values)


def _check_head(directory: Path, places: Places, tied: bool) -> None:
    """Raise CheckpointError unless the output head equals wte; `tied` counts if the files have no head."""
    if "lm_head.weight" in places:
        tied = np.array_equal(_load(*places["lm_head.weight"]), _load(*places["wte.weight"]))
    if not tied:
        raise CheckpointError(f"{directory}: its output head is not its token embedding; only tied ones are supported")


# ---- writing ----


def write(weights: Weights, directory: Path, dtype: str, tokenizer: Tokenizer | None) -> None:
    """Write the configuration, the weights in dtype "fp32" or "bf16", and the tokenizer's files."""
    eot = {} if tokenizer is None else {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
    _write_json(directory / "config.json", _config(weights.model, dtype) | eot)
    _write_json(directory / "generation_config.json", {"_from_model_config": True} | eot)
    read = weights.read_all("exporting")
    tensors = {f"transformer.{name}": _tensor(values, name, dtype) for name, values in read}
    save_file(tensors, directory / MODEL, metadata={"format": "pt"})
    shutil.copymode(directory / "config.json", directory / MODEL)  # safetensors makes it private
    if tokenizer is not None:
        _write_tokenizer(directory, tokenizer, weights.model.block_size)


def _config(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of config.json, without dropout as in training here."""
    sizes = {theirs: getattr(model, ours) for ours, theirs in CONFIG_KEYS.items()}
    computes = {key: allowed[0] for key, allowed in REQUIRED.items()}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    stored = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    rest = {"n_inner": None, "tie_word_embeddings": True, "initializer_range": 0.02, "torch_dtype": stored}
    return {"architectures": ["GPT2LMHeadModel"]} | computes | sizes | dropout | rest


def _tensor(values: np.ndarray, name: str, dtype: str) -> Tensor:
    values = np.ascontiguousarray(values.T if name.endswith(CONV1D) else values)
    return torch.from_numpy(values) if dtype == "fp32" else torch.from_numpy(round_bf16(values)).view(torch.bfloat16)


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json, derived from the bytes of each token."""
    tokens, spelling = tokenizer.token_bytes(), byte_spelling()

    def spell(token: bytes) -> str:
        return "".join(spelling[b] for b in token)

    ordinary = [token for i, token in enumerate(tokens) if i != tokenizer.eot]
    lines = ["#version: 0.2", *(f"{spell(left)} {spell(right)}" for left, right in merges(ordinary))]
    _write_json(directory / "vocab.json", {spell(token): i for i, token in enumerate(tokens)})
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    end = spell(tokens[tokenizer.eot])
    special = {"bos_token": end, "eos_token": end, "unk_token": end}
    rest = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": block_size}
    _write_json(directory / "tokenizer_config.json", rest | special)


def merges(tokens: list[bytes]) -> Iterator[list[bytes]]:
    """Yield the two parts from which byte-pair encoding merged each token of several bytes.

    `tokens` are in the order of the merges; the parts of a token are its bytes after all earlier merges.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    for token in tokens:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pairs = [rank.get(left + right, len(tokens)) for left, right in itertools.pairwise(parts)]
            first = pairs.index(min(pairs))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            yield parts


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
