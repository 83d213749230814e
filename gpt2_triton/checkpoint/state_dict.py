"""Find a GPT-2, a Llama or a Qwen3 among the named tensors of another program's file.

Programs put their wrappers into the names, leave out one of the tied pair of embedding and output
head, and add what is not needed to write text.  This module finds each parameter under its name in
weights.py.  Tensors that are known and not needed are left out; any other is refused.
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
WRAPPERS = set(
    "transformer module _orig_mod model base_model "
    "_fsdp_wrapped_module _checkpoint_wrapped_module".split()
)
# causal masks and rotations in older files, computed here
COMPUTED = re.compile(
    r"h\.\d+\.attn\.(bias|masked_bias)|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
)
# the heads of transformers' and TRL's models that do not write text
OTHER_HEADS = re.compile(r"(score|classifier|qa_outputs|multiple_choice_head|v_head)\.")
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
HEAD = "lm_head.weight"
QKV = "h.0.attn.c_attn.weight"
EMBEDDING = {"gpt2": "wte.weight", "llama": "embed_tokens.weight"}
NAMES = {"gpt2": "GPT-2", "llama": "Llama"}


def find_weights(
    where: str,
    model: ModelConfig,
    given: Iterable[str],
    load: Callable[[str], Any],
    biases: bool = True,
    tied: bool = True,
) -> Weights:
    """Return the model among the tensors `given`, which `load` reads;
    CheckpointError unless it is all there.

    GPT-2's matrices may be [out, in] as ours, or [in, out] as transformers'.  Without `biases`, an
    absent bias is zero.  Without `tied` a head must be stored.  A stored head of its own makes a
    Llama untied, and is refused for GPT-2.
    """
    names = _by_bare_name(where, given)
    embedding = EMBEDDING[model.arch]
    if model.tied and HEAD in names:
        names.setdefault(embedding, names[HEAD])
    needed = {
        _bare(name) for name in parameter_shapes(model) if biases or not name.endswith(".bias")
    }
    _check_names(where, model, names, needed if tied else needed | {HEAD})
    if model.tied and HEAD in names:
        shape = (model.vocab_size, model.n_embd)
        head = to_fp32(floats(where, names[HEAD], load, shape))
        embedded = to_fp32(floats(where, names[embedding], load, shape))
        if not np.array_equal(head, embedded):
            model = _untied(where, model)
    shapes = parameter_shapes(model)
    conv1d = model.arch == "gpt2" and getattr(load(names[QKV]), "shape", None) == shapes[QKV][::-1]

    def read(name: str, rows: slice) -> np.ndarray:
        stored = names.get(_bare(name))
        if stored is None:
            return np.zeros(shapes[name], np.float32)[rows]
        if conv1d and name.endswith(CONV1D):
            return to_fp32(floats(where, stored, load, shapes[name][::-1])[:, rows]).T
        return to_fp32(floats(where, stored, load, shapes[name])[rows])

    return Weights(where, model, tokenizer_of(model), read)


def _by_bare_name(where: str, given: Iterable[str]) -> dict[str, str]:
    """Return what each name without wrappers is in the file; CheckpointError if two are equal."""
    names = dict[str, str]()
    for name in given:
        bare = _bare(name)
        if bare in names:
            raise CheckpointError(
                f"{where}: has {names[bare]} and {name}; take one of them out of the file"
            )
        if not COMPUTED.fullmatch(bare):
            names[bare] = name
    return names


def _bare(name: str) -> str:
    """Return a tensor's name without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def floats(
    where: str, name: str, load: Callable[[str], Any], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the tensor that `load` reads; CheckpointError unless it has this shape, in
    16 bits or more a number.
    """
    tensor = load(name)
    is_tensor = isinstance(tensor, torch.Tensor)
    is_float = is_tensor and tensor.is_floating_point() and tensor.element_size() > 1  # 1: fp8
    if not is_float or tuple(tensor.shape) != shape:
        got = f"{tensor.dtype} {tuple(tensor.shape)}" if is_tensor else f"a {type(tensor).__name__}"
        todo = "take the model that is not quantized"
        if is_float:
            todo = "correct the sizes in its configuration"
        raise CheckpointError(
            f"{where}: {name} is {got}, expected floating-point numbers {shape}; {todo}"
        )
    return tensor


def _check_names(where: str, model: ModelConfig, names: dict[str, str], needed: set[str]) -> None:
    """Raise CheckpointError unless the tensors are the model's; name heads that are left out."""
    this = f"a {'Qwen3' if model.qk_norm else NAMES[model.arch]} of {model.n_layer} layers"
    others = names.keys() - {_bare(name) for name in parameter_shapes(model)} - {HEAD}
    heads = sorted(names[bare] for bare in others if OTHER_HEADS.match(bare))
    unknown = sorted(names[bare] for bare in others if names[bare] not in heads)
    if unknown:
        todo = "correct its configuration, merge its adapters, or take this tensor out of the file"
        raise CheckpointError(f"{where}: {unknown[0]} is no part of {this}; {todo}")
    missing = sorted(needed - names.keys())
    if missing:
        todo = "correct its configuration, or save the whole model"
        raise CheckpointError(f"{where}: has no tensor {missing[0]}, a part of {this}; {todo}")
    if heads:
        listed = textwrap.shorten(", ".join(heads), 160, placeholder=" ...")
        _note(f"{where}: tensors of other heads left out ({len(heads)}): {listed}")


def _untied(where: str, model: ModelConfig) -> ModelConfig:
    """Return a tied model with a head of its own; CheckpointError for GPT-2."""
    wrong = f"{where}: its output head is not its token embedding"
    if model.arch == "gpt2":
        raise CheckpointError(f"{wrong}; only tied ones are supported")
    _note(f"{wrong}, though its configuration ties them: the stored head is used")
    return model.model_copy(update={"tied": False})


def _note(text: str) -> None:
    if is_first_rank():
        print_line(f"note: {text}", error=True)
