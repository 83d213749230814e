"""A model's weights under other projects' names, between their files and our flat buffers.

GPT-2 has OpenAI's names, which Hugging Face and nanoGPT use, and llm.c their order; Llama
has Hugging Face's.  `by_name` maps names to our tensors.  All matrices are [out, in].
Numbers are fp32, which holds every number of fp16 and bf16.  A model is read part by part,
since a host may not hold it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from gpt2_triton.checkpoint.source_files import has_tokenizer
from gpt2_triton.checkpoint.stored import StoredTensor
from gpt2_triton.config.config import Config
from gpt2_triton.config.rules import HEAD_SIZES
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.config.values import TOKENIZER_SIZES
from gpt2_triton.console import Progress
from gpt2_triton.data.tokenizer import identity
from gpt2_triton.errors import CheckpointError
from gpt2_triton.model import architecture
from gpt2_triton.model.tables import Part, param_views

PADDED_GPT2 = 51_200  # rows to which Megatron pads GPT-2's tokens; most others pad them to 50,304
PART = 1 << 22  # elements that are read at once, unless a row has more


def by_name(flat: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """Return views of a flat buffer of parameters by other projects' names; wte is
    without its padding rows.
    """
    A = architecture.of(model)
    dims = architecture.dimensions(model)
    return A.by_name(param_views(A.Params, flat, dims), model.vocab_size)


def flat_length(model: ModelConfig) -> int:
    """Return the number of elements of a flat buffer of parameters, padding included."""
    return architecture.dimensions(model)["N"]


def _places(model: ModelConfig) -> dict[str, Tensor]:
    """Return the parameters of `by_name` without memory: their shapes and offsets."""
    return by_name(torch.empty(flat_length(model), dtype=torch.uint8, device="meta"), model)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by name, in the order of the forward pass."""
    return {name: tuple(place.shape) for name, place in _places(model).items()}


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights in a file; nothing is read before `rows` is called."""

    where: str  # names the file in errors
    model: ModelConfig
    tokenizer: str | None  # a name in data/tokenizer.py; None if it is not known, or another one
    rows: Callable[[str, slice], np.ndarray]  # reads these rows of the parameter of this name, fp32
    beside: Path | None = None  # a directory that may have the files of source_files.py

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name, in the order of the forward pass."""
        return parameter_shapes(self.model)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return rows of a parameter, fp32; CheckpointError unless they are finite."""
        values = self.rows(name, rows)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self.where}: {name} has a NaN or an infinity; take an earlier checkpoint"
            )
        return values

    def read_all(
        self, what: str, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yield (name, first row, rows) of each name, PART elements at most, but a row or more."""
        names = list(self.shapes if names is None else names)
        total = sum(math.prod(self.shapes[name]) for name in names)
        with Progress(what, total, "parameters") as progress:
            for name in names:
                length, *width = self.shapes[name]
                step = max(1, PART // math.prod(width))
                for first in range(0, length, step):
                    values = self.read(name, slice(first, first + step))
                    yield name, first, values
                    progress.advance(values.size)


def model_config_from_sizes(where: str, **sizes: object) -> ModelConfig:
    """Return a model of a file's sizes; CheckpointError if no model here can have them."""
    try:
        return ModelConfig.model_validate(sizes)
    except ValidationError as error:
        got = ", ".join(f"{name} {str(value)[:40]}" for name, value in sizes.items())
        raise CheckpointError(
            f"{where}: not a model that fits here: {got} ({first_problem(error)})"
        ) from None


def require_supported(
    path: Path, config: Mapping[str, Any], supported: Mapping[str, Sequence[Any]]
) -> None:
    """Raise CheckpointError for all keys of a config.json that change what a model computes; the
    first supported value is the default.
    """
    wrong = [
        f"{key} is {config[key]!r}, and only {' or '.join(map(repr, values))} is supported"
        for key, values in supported.items()
        if config.get(key, values[0]) not in values
    ]
    if wrong:
        raise CheckpointError(f"{path}: {'; '.join(wrong)}")


def first_problem(error: ValidationError) -> str:
    """Return the first problem in an error of pydantic, as one line."""
    first = error.errors()[0]
    return ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])


def tokenizer_of(model: ModelConfig) -> str | None:
    """Return the tokenizer of weights without its files, if their rows
    tell; a GPT-2's may be padded.
    """
    for name, size in TOKENIZER_SIZES.items():
        if model.vocab_size == size and (name, model.arch) != ("gpt2", "llama"):
            return name
    padded = model.arch == "gpt2" and TOKENIZER_SIZES["gpt2"] <= model.vocab_size <= PADDED_GPT2
    return "gpt2" if padded else None


# ---- to and from our buffers ----


def no_tokenizer(weights: Weights) -> CheckpointError:
    """Return the error about weights with another tokenizer, or without one."""
    todo = "name its tokenizer as data.tokenizer of a run"
    if weights.where.startswith("nanogpt:"):
        todo = f"put its meta.pkl, with as many tokens, beside it, or {todo}"
    if weights.beside:
        todo = f"put its tokenizer.json into {weights.beside}"
    return CheckpointError(
        f"{weights.where}: its {weights.model.vocab_size:,} tokens have no known tokenizer; "
        f"{todo}; without one its weights can only be exported"
    )


def require_runnable(weights: Weights, tokenizer: str | None) -> None:
    """Raise CheckpointError unless weights run here with this tokenizer."""
    sizes = HEAD_SIZES[weights.model.arch]
    if weights.model.head_size not in sizes:
        raise CheckpointError(
            f"{weights.where}: heads of {weights.model.head_size} channels do not run here, "
            f"only of {', '.join(map(str, sizes))}; its weights can only be exported"
        )
    if tokenizer is None:
        raise no_tokenizer(weights)


def flat_parts(weights: Weights, config: Config) -> Iterator[Part]:
    """Yield parts of `params`, and of `low` if the run keeps fp32 masters, flat as in a checkpoint.

    fp32 and masters are exact; bf16 without masters is rounded to nearest, ties to even.
    The padding rows of wte are in no part.  Positions from the run's block_size on are left
    out.  `check_sizes` has passed.
    """
    places = _places(config.model)
    for name, row, values in weights.read_all(f"reading {weights.where}"):
        place = places[name][row : row + len(values)]
        values = np.ravel(values[: len(place)])
        first = int(place.storage_offset())
        if config.train.dtype == "fp32":
            yield "params", first, torch.from_numpy(values)
        elif config.optim.master == "fp32":
            high, low = split_master(values)
            yield "params", first, torch.from_numpy(high).view(torch.bfloat16)
            yield "low", first, torch.from_numpy(low)
        else:
            yield "params", first, torch.from_numpy(round_bf16(values)).view(torch.bfloat16)


def to_flat_buffers(weights: Weights, config: Config) -> dict[str, Tensor]:
    """Return the tensors of `flat_parts` whole; the padding rows of wte are zero.
    CheckpointError for other sizes.
    """
    check_sizes(weights, config)
    n = flat_length(config.model)
    out = dict[str, Tensor]()
    for name, first, elements in flat_parts(weights, config):
        if name not in out:
            out[name] = elements.new_zeros(n)
        out[name][first : first + len(elements)] = elements
    return out


def _sizes(m: ModelConfig) -> dict[str, Any]:
    """Return what a model computes with; what null stands for is in numbers."""
    given = m.model_dump(exclude={"dropout"})
    if m.arch == "llama":
        given |= {"n_kv_head": m.n_kv_head or m.n_head, "head_dim": m.head_size, "n_inner": m.inner}
    return given


def check_sizes(weights: Weights, config: Config) -> None:
    """Raise CheckpointError unless a run of this configuration can start from the weights."""
    usual = config.data.tokenizer
    has_few_rows = weights.model.vocab_size < TOKENIZER_SIZES.get(usual, 0)
    is_other = has_few_rows or has_tokenizer(weights.beside)
    require_runnable(weights, weights.tokenizer or (None if is_other else usual))
    theirs = _sizes(weights.model) | {"tokenizer": identity(weights.tokenizer or usual)}
    ours = _sizes(config.model) | {"tokenizer": identity(usual)}
    theirs["block_size"] = min(theirs["block_size"], ours["block_size"])  # later positions are cut
    wrong = [key for key in ours if theirs[key] != ours[key]]
    if wrong:
        has = ", ".join(f"{key} {theirs[key]}" for key in wrong)
        needs = ", ".join(f"{key} {ours[key]}" for key in wrong)
        todo = [f"model.{key} to {theirs[key]}" for key in wrong if key != "tokenizer"]
        if "tokenizer" in wrong:
            todo.append(f"data.tokenizer to {weights.tokenizer}")
        raise CheckpointError(
            f"init_from: {weights.where} has {has}, this run {needs}; set {' and '.join(todo)}"
        )


def from_checkpoint(
    where: str, stored: Mapping[str, StoredTensor], config: Config, beside: Path | None = None
) -> Weights:
    """Return the weights in the tensors of our checkpoint: the fp32 masters, if it has them."""
    places = _places(config.model)

    def read(name: str, rows: slice) -> np.ndarray:
        place = places[name][rows]
        return read_fp32(stored, int(place.storage_offset()), place.numel()).reshape(place.shape)

    return Weights(where, config.model, config.data.tokenizer, read, beside)


def read_fp32(stored: Mapping[str, StoredTensor], first: int, length: int) -> np.ndarray:
    """Return elements of our checkpoint's weights in fp32: of the masters, if it has them."""
    high = stored["params"].read(first, length)
    if "low" not in stored:
        return to_fp32(high)
    low = stored["low"].read(first, length)
    return join_master(high.view(torch.int16).numpy(), low.numpy())


# ---- bits ----


def round_bf16(values: np.ndarray) -> np.ndarray:
    """Return the bits, as int16, of finite fp32 rounded to the nearest bf16,
    ties to even as in PyTorch.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.int16)


def to_fp32(tensor: Tensor) -> np.ndarray:
    """Return the values of a host tensor in fp32, bf16, fp16 or fp64 as fp32."""
    if tensor.dtype == torch.bfloat16:
        return from_bf16(tensor.view(torch.int16).numpy())
    return tensor.detach().numpy().astype(np.float32, copy=False)


def from_bf16(high: np.ndarray) -> np.ndarray:
    """Return the fp32 values of bf16 bits, int16."""
    return (high.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def split_master(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (bits of the bf16 weight, 16 lower bits), both int16, as split_master in
    kernels/master.py does.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    high = ((bits + 0x8000) >> 16).astype(np.uint16)
    return high.view(np.int16), (bits & 0xFFFF).astype(np.uint16).view(np.int16)


def join_master(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return the fp32 values that `split_master` split."""
    rest = low.view(np.uint16).astype(np.uint32)
    carry = (rest >> 15) << 16
    return ((high.view(np.uint16).astype(np.uint32) << 16 | rest) - carry).view(np.float32)
