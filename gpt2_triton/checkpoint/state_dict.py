"""Find a GPT-2 among the named tensors of another program's file.

Programs put their wrappers into the names, leave out one of the tied pair wte and lm_head, and add other heads.  This
module finds each parameter under its name in weights.py, and tells what it leaves out.
"""

import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from gpt2_triton.checkpoint.weights import Weights, parameter_shapes, to_fp32, tokenizer_of
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.console import is_first_rank, print_line
from gpt2_triton.errors import CheckpointError

# in names by models with a head, DDP, torch.compile, Lightning, PEFT, FSDP
WRAPPERS = set("transformer module _orig_mod model base_model _fsdp_wrapped_module _checkpoint_wrapped_module".split())
BODY = re.compile(r"(wte|wpe|ln_f|h\.\d+)\.")
MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # causal masks in older files
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
HEAD, EMBEDDING, QKV = "lm_head.weight", "wte.weight", "h.0.attn.c_attn.weight"


def find_weights(
    where: str,
    model: ModelConfig,
    given: Iterable[str],
    load: Callable[[str], Any],
    biases: bool = True,
    tied: bool = True,
) -> Weights:
    """Return the GPT-2 among the tensors `given`, which `load` reads; CheckpointError unless it is all there.

    A layer's matrices may be [out, in] as ours, or [in, out] as transformers'.  Without `biases`, an absent bias is
    zero.  `tied` counts if no head is stored.  Other heads are left out, with a line that names them.
    """
    shapes = parameter_shapes(model)
    names = {".".join(part for part in name.split(".") if part not in WRAPPERS): name for name in given}
    names = {name: names[name] for name in names if not MASKS.fullmatch(name)}
    head = names.pop(HEAD, None)
    if head is not None:
        names.setdefault(EMBEDDING, head)
    _check_names(where, model, names, {name for name in shapes if biases or not name.endswith(".bias")})
    conv1d = getattr(load(names[QKV]), "shape", None) == shapes[QKV][::-1]

    def read(name: str, rows: slice) -> np.ndarray:
        if name not in names:
            return np.zeros(shapes[name], np.float32)[rows]
        if conv1d and name.endswith(CONV1D):
            return to_fp32(floats(where, names[name], load, shapes[name][::-1])[:, rows]).T
        return to_fp32(floats(where, names[name], load, shapes[name])[rows])

    if head is not None:
        tied = np.array_equal(to_fp32(floats(where, head, load, shapes[EMBEDDING])), read(EMBEDDING, slice(None)))
    if not tied:
        raise CheckpointError(f"{where}: its output head is not its token embedding; only tied ones are supported")
    return Weights(where, model, tokenizer_of(model), read)


def floats(where: str, name: str, load: Callable[[str], Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that `load` reads; CheckpointError unless it has this shape, in 16 bits or more a number."""
    is_tensor = isinstance(tensor := load(name), torch.Tensor)
    is_float = is_tensor and tensor.is_floating_point() and tensor.element_size() > 1  # 1: fp8
    if not is_float or tuple(tensor.shape) != shape:
        got = f"{tensor.dtype} {tuple(tensor.shape)}" if is_tensor else f"a {type(tensor).__name__}"
        wrong = f"{where}: {name} is {got}, expected floating-point numbers {shape}"
        raise CheckpointError(f"{wrong}; correct the sizes in its configuration, or save it in fp32")
    return tensor


def _check_names(where: str, model: ModelConfig, names: dict[str, str], expected: set[str]) -> None:
    """Raise CheckpointError unless the transformer is as `model` says; print a line about tensors beside it."""
    this = f"a GPT-2 of {model.n_layer} layers"
    others = sorted(names[name] for name in names.keys() - parameter_shapes(model).keys())
    if unknown := sorted(name for name in names if names[name] in others and BODY.match(name)):
        todo = "correct its configuration, or merge its adapters"
        raise CheckpointError(f"{where}: {unknown[0]} is no part of {this}; {todo}")
    if missing := sorted(expected - names.keys()):
        todo = "correct its configuration, or save the whole model"
        raise CheckpointError(f"{where}: has no tensor {missing[0]}, a part of {this}; {todo}")
    if others and is_first_rank():
        listed = textwrap.shorten(", ".join(others), 160, placeholder=" ...")
        print_line(f"note: {where}: tensors of other heads left out ({len(others)}): {listed}", error=True)
