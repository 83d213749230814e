"""Read nanoGPT's ckpt.pt, a pickle of `model` (a state dict) and `model_args`, without executing it.

Tensors have the names of weights.py after the prefix "transformer." and, in a compiled model, "_orig_mod."; matrices
are [out, in]; the head repeats wte.  With bias=False there are no biases, and ours are zero.  nanoGPT's GELU is the
form with erf, ours GPT-2's with tanh: logits differ by about 1e-3 (12 layers of 768 channels, random weights).
"""

import re
import textwrap

import numpy as np
import torch

from gpt2_triton.checkpoint.weights import Weights, model_config_from_sizes, parameter_shapes, to_fp32, tokenizer_of
from gpt2_triton.errors import CheckpointError

MODEL_ARGS = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")  # keys of model_args
PREFIX = re.compile(r"^(_orig_mod\.)?(transformer\.)?")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MASK = re.compile(r"h\.\d+\.attn\.bias")  # in models without flash attention


def read(path: str) -> Weights:
    """Return the GPT-2 in a checkpoint of nanoGPT, mapped into memory; CheckpointError if it is not one."""
    where = f"nanogpt:{path}"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises almost any
        got = textwrap.shorten(str(error), 120, placeholder=" ...")
        raise CheckpointError(f"{where}: cannot be read ({got}); expected nanoGPT's ckpt.pt") from None
    if not (isinstance(content, dict) and all(isinstance(content.get(key), dict) for key in ("model", "model_args"))):
        raise CheckpointError(f"{where}: has no model and model_args; expected nanoGPT's ckpt.pt")
    arguments = content["model_args"]
    if missing := [key for key in MODEL_ARGS if key not in arguments]:
        raise CheckpointError(f"{where}: its model_args have no {missing[0]}; expected nanoGPT's ckpt.pt")
    model = model_config_from_sizes(where, **{key: arguments[key] for key in MODEL_ARGS})
    tensors = {PREFIX.sub("", str(name)): t for name, t in content["model"].items()}
    tensors = {name: t for name, t in tensors.items() if name != "lm_head.weight" and not MASK.fullmatch(name)}

    shapes = parameter_shapes(model)
    absent = {name for name in shapes if name.endswith(".bias")} if not arguments.get("bias", True) else set()
    for missing_name in sorted(shapes.keys() - tensors.keys() - absent):
        raise CheckpointError(f"{where}: has no tensor {missing_name}, which its model_args require")
    for unknown in sorted(tensors.keys() - shapes.keys()):
        raise CheckpointError(f"{where}: {unknown} belongs to no nanoGPT of {model.n_layer} layers")
    for name, t in tensors.items():  # before memory is taken for a view of one element repeated
        if not isinstance(t, torch.Tensor) or t.dtype not in FLOATS or tuple(t.shape) != shapes[name]:
            got = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
            expected = f"floating-point numbers {shapes[name]}; its sizes do not fit it"
            raise CheckpointError(f"{where}: {name} is {got}, expected {expected}")

    def tensor(name: str) -> np.ndarray:
        return to_fp32(tensors[name]) if name in tensors else np.zeros(shapes[name], np.float32)

    return Weights(where, model, tokenizer_of(model), tensor)
