"""A GPT-2's weights by the names that OpenAI gave them, between other projects' files and our flat buffers.

Hugging Face, nanoGPT and llm.c all use these names (llm.c as an order).  `by_name` is the one table of which of our
tensors is which of theirs.  All matrices here are [out, in]; numbers are fp32, the only dtype that holds every other.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from gpt2_triton.config.config import TOKENIZER_SIZES, Config
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.errors import CheckpointError
from gpt2_triton.model.buffers import param_entries, param_views
from gpt2_triton.model.memory_plan import model_dimensions


def by_name(flat: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """Views of a flat buffer of parameters by GPT-2's names; wte is its first vocab_size rows, without the padding."""
    p, L = param_views(flat, model_dimensions(model)), model.n_layer
    out = {"wte.weight": p.wte[: model.vocab_size], "wpe.weight": p.wpe}
    for l in range(L):
        layer = {
            "ln_1.weight": p.lnw[2 * l],
            "ln_1.bias": p.lnb[2 * l],
            "attn.c_attn.weight": p.qkvw[l],
            "attn.c_attn.bias": p.qkvb[l],
            "attn.c_proj.weight": p.attprojw[l],
            "attn.c_proj.bias": p.attprojb[l],
            "ln_2.weight": p.lnw[2 * l + 1],
            "ln_2.bias": p.lnb[2 * l + 1],
            "mlp.c_fc.weight": p.fcw[l],
            "mlp.c_fc.bias": p.fcb[l],
            "mlp.c_proj.weight": p.fcprojw[l],
            "mlp.c_proj.bias": p.fcprojb[l],
        }
        out |= {f"h.{l}.{name}": tensor for name, tensor in layer.items()}
    return out | {"ln_f.weight": p.lnw[2 * L], "ln_f.bias": p.lnb[2 * L]}


def count(model: ModelConfig) -> int:
    """Elements of a flat buffer of parameters, padding included."""
    return sum(math.prod(e.shape) for e in param_entries(model_dimensions(model)))


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model that a file holds.  `tensor` reads one of its parameters as fp32; nothing is read before."""

    where: str  # what an error calls it
    model: ModelConfig
    tokenizer: str | None  # of data/tokenizer.py, where it is known
    tensor: Callable[[str], np.ndarray]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name, in the order of the forward pass."""
        nothing = torch.empty(count(self.model), dtype=torch.uint8, device="meta")
        return {name: tuple(view.shape) for name, view in by_name(nothing, self.model).items()}

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One parameter, fp32, finite and of this shape; else CheckpointError."""
        values = self.tensor(name)
        if values.shape != shape:
            raise CheckpointError(f"{self.where}: {name} is {values.shape}, expected {shape}; its sizes do not fit it")
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.where}: {name} has numbers that are not finite; take an earlier one")
        return values


def sized(where: str, **sizes: object) -> ModelConfig:
    """The sizes that a file states; CheckpointError for those that no model here can have."""
    try:
        return ModelConfig.model_validate(sizes)
    except ValidationError as error:
        stated = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise CheckpointError(f"{where}: not a GPT-2 that fits here: {stated} ({first_problem(error)})") from None


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's complaints, in a line."""
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])


def tokenizer_of(model: ModelConfig) -> str | None:
    """The tokenizer of a model that names none, by its vocabulary, which may have more rows than GPT-2 tokens."""
    if model.vocab_size == TOKENIZER_SIZES["bytes"]:
        return "bytes"
    return "gpt2" if model.vocab_size >= TOKENIZER_SIZES["gpt2"] else None


# ---- into our buffers ----


def pack(weights: Weights, config: Config) -> dict[str, Tensor]:
    """`params`, and `low` where the run keeps fp32 masters, as a checkpoint has them.

    Exact in fp32 and with masters; bf16 alone is rounded to the nearest, ties to even.  Padding rows of wte are zero;
    of a longer position embedding the first block_size rows are taken.
    """
    _check_sizes(weights, config.model)
    in_fp32, masters, n = config.train.dtype == "fp32", config.optim.master == "fp32", count(config.model)
    params = torch.from_numpy(np.zeros(n, np.float32 if in_fp32 else np.int16))
    low = torch.from_numpy(np.zeros(n if masters else 0, np.int16))
    lows = by_name(low, config.model) if masters else {}
    shapes = weights.shapes()
    for name, view in by_name(params, config.model).items():
        values = weights.read(name, shapes[name])[: view.shape[0]]
        if in_fp32:
            view.numpy()[...] = values
        elif masters:
            view.numpy()[...], lows[name].numpy()[...] = split_master(values)
        else:
            view.numpy()[...] = round_bf16(values)
    out = {"params": params if in_fp32 else params.view(torch.bfloat16)}
    return out | {"low": low} if masters else out


def _check_sizes(weights: Weights, ours: ModelConfig) -> None:
    theirs, now = weights.model.model_dump(), ours.model_dump()
    wrong = [k for k in now if (theirs[k] < now[k] if k == "block_size" else theirs[k] != now[k])]
    if wrong:
        has, needs = (", ".join(f"{k} {sizes[k]}" for k in wrong) for sizes in (theirs, now))
        todo = " and ".join(f"model.{k} to {theirs[k]}" for k in wrong)
        raise CheckpointError(f"init_from: {weights.where} has {has}, this run {needs}; set {todo}")


# ---- out of our buffers ----


def from_checkpoint(where: str, tensors: dict[str, Tensor], config: Config) -> Weights:
    """The weights of one of our checkpoints: the masters, where it has them."""
    views = {part: by_name(tensors[part], config.model) for part in ("params", "low") if part in tensors}

    def tensor(name: str) -> np.ndarray:
        stored = views["params"][name]
        if stored.dtype == torch.float32:
            return stored.numpy()
        high = stored.view(torch.int16).numpy()
        return join_master(high, views["low"][name].numpy()) if "low" in views else from_bf16(high)

    return Weights(where, config.model, config.data.tokenizer, tensor)


# ---- bits ----


def round_bf16(values: np.ndarray) -> np.ndarray:
    """The bits, as int16, of finite fp32 rounded to the nearest bf16, ties to even: what PyTorch does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.int16)


def from_bf16(high: np.ndarray) -> np.ndarray:
    """fp32 of the bits of bf16, int16."""
    return (high.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def split_master(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bits of the bf16 weight, 16 lower bits), both int16: kernels/master.py's split in integers."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    high = ((bits + 0x8000) >> 16).astype(np.uint16)
    return high.view(np.int16), (bits & 0xFFFF).astype(np.uint16).view(np.int16)


def join_master(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """fp32 from what `split_master` gave."""
    rest = low.view(np.uint16).astype(np.uint32)
    carry = (rest >> 15) << 16
    return ((high.view(np.uint16).astype(np.uint32) << 16 | rest) - carry).view(np.float32)
