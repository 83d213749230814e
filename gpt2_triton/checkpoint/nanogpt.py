"""Read nanoGPT's ckpt.pt, a pickle of `model` (a state dict) and
`model_args`, without executing it.

build-nanogpt has the sizes in `config`, an object.  Matrices are [out, in].  With bias=False there
are no biases, and ours are zero.  nanoGPT's GELU is the form with erf, ours GPT-2's with tanh:
logits differ by about 1e-3 (12 layers of 768 channels, random weights).  The tokenizer of a model
of characters is meta.pkl, from the folder of its data; beside ckpt.pt it is found.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from gpt2_triton.checkpoint.state_dict import find_weights
from gpt2_triton.checkpoint.weights import Weights, model_config_from_sizes
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import CheckpointError

MODEL_ARGS = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")  # keys of model_args


class Inert:
    """Stands for every class and function that a file names: takes the
    values, and executes nothing.
    """

    values: Any = None

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, values: Any) -> None:
        self.values = values


def read(path: str) -> Weights:
    """Return the GPT-2 in a checkpoint of nanoGPT, mapped into memory;
    CheckpointError if it is not one.
    """
    where = f"nanogpt:{path}"
    expected = "expected nanoGPT's ckpt.pt"
    try:
        with safe_globals([(Inert, name) for name in get_unsafe_globals_in_checkpoint(path)]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises almost any
        if isinstance(error, OSError):
            got = error.strerror
        else:
            got = "it is damaged, or not of torch.save"
        raise CheckpointError(f"{where}: cannot be read ({got}); {expected}") from None
    content = content if isinstance(content, dict) else {}
    arguments = content.get("model_args", getattr(content.get("config"), "values", None))
    if not isinstance(content.get("model"), dict) or not isinstance(arguments, dict):
        raise CheckpointError(
            f"{where}: has no model and model_args; {expected}; "
            "save other weights as model.safetensors beside a config.json, and take hf:DIRECTORY"
        )
    if missing := [key for key in MODEL_ARGS if key not in arguments]:
        raise CheckpointError(f"{where}: its model_args have no {', '.join(missing)}; {expected}")
    model = model_config_from_sizes(where, **{key: arguments[key] for key in MODEL_ARGS})
    state = {str(name): tensor for name, tensor in content["model"].items()}
    biases = arguments.get("bias", True)
    weights = find_weights(where, model, state, state.__getitem__, biases=biases)
    characters = Path(path).with_name("meta.pkl")
    if weights.tokenizer or not characters.is_file():
        return weights
    tokenizer = str(characters)
    if get_tokenizer(tokenizer).vocab_size != model.vocab_size:
        return weights
    return dataclasses.replace(weights, tokenizer=tokenizer)
