"""Compares the gradients of bf16 and fp8 with float64's, tensor by tensor, at
the weights of a checkpoint.

    python -m benchmarks.accuracy.gradients RUN --data 'SHARDS/train_*.bin'

The loss is the mean of `--batches` micro-batches.  Let g be our gradient in bf16 or in fp8, and e
the gradient in float64 from the same bf16 weights.  For each kind of tensor it prints:

    cosine     g e / (|g| |e|), the least over the layers
    along      g e / (e e), the least and the largest over the layers; 1 if the
               error g - e is orthogonal to e
    error      |g - e| / |e|, the largest over the layers

The last block has float64 gradients of other batches as g.  It shows how much the
gradients of two batches agree.
"""

import gc
import math
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

import gpt2_triton.kernels as K
from benchmarks import torch_reference
from gpt2_triton import device
from gpt2_triton.checkpoint.sources import load_weights
from gpt2_triton.commands import app as commands
from gpt2_triton.config.config import Config
from gpt2_triton.data.loader import TrainLoader
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.data.shards import open_shards
from gpt2_triton.errors import ConfigError
from gpt2_triton.kernels.tuning import INTERPRET
from gpt2_triton.model.fp8 import calibrate
from gpt2_triton.model.model import Model
from gpt2_triton.training.lr_schedule import step_inputs

Count = Annotated[int, commands.AT_LEAST_1]
app = commands.make_app("python -m benchmarks.accuracy.gradients")

Gradients = dict[str, Tensor]  # by the names of torch_reference.tensors


class Agreement(NamedTuple):
    """The agreement of the tensors of one kind, or of all tensors taken as one."""

    cosine: float
    along: tuple[float, float]
    error: float


def configs_of(saved: Config, batch: int, batches: int) -> dict[str, Config]:
    """Return a configuration for each of bf16 and two kinds of fp8: bf16 storage,
    `batches` micro-batches per step.
    """
    arms = {"bf16": ("bf16", "none"), "fp8, head in bf16": ("fp8", "head"), "fp8": ("fp8", "none")}
    train = {
        "batch_size": batch,
        "total_batch_tokens": batch * batches * saved.train.seq_len,
        "dtype": "bf16",
    }
    return {
        name: saved.replace(
            train=train | {"precision": precision},
            fp8={"keep_bf16": keep},
            optim={"master": "none", "name": "adamw"},
            memory={"recompute": "none"},
        )
        for name, (precision, keep) in arms.items()
    }


def windows(pattern: str, config: Config, batches: int, first: int) -> list[np.ndarray]:
    """Return `batches` arrays of tokens [B, T+1], beginning with batch `first` of the data."""
    t = config.train
    shards = open_shards(pattern, config.model.vocab_size, t.seq_len)
    loader = TrainLoader(shards, t.seq_len, config.data.seed)
    return [loader.batch((first + i) * t.batch_size, t.batch_size) for i in range(batches)]


def ours(
    config: Config, params: Tensor, batches: Sequence[np.ndarray]
) -> tuple[float, Gradients, dict[str, int]]:
    """Return the loss, the gradients on the host and the model's dimensions."""
    model = Model(config, K, device.device_name())
    model.eager = True
    model.initialise(config.train.seed)
    model.state.params.copy_(params)
    packed = [pack_batch(None, w[:, :-1], w[:, 1:], config.model.vocab_size) for w in batches]
    if model.has_fp8:
        calibrate(model, packed, step_inputs(0, config))
    model.begin_step(step_inputs(0, config), 0, config.train.seed)
    for i, batch in enumerate(packed):
        model.micro_step(batch, first=i == 0)
    found = {
        name: t.cpu() for name, t, _ in torch_reference.tensors(model.train_view.g, model.dims)
    }
    loss = model.end_step().result().loss
    dims = model.dims
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return loss, found, dims


def exact(
    params: Tensor, dims: dict[str, int], batches: Sequence[np.ndarray]
) -> tuple[float, Gradients]:
    """Return PyTorch's loss and gradients in float64, one sequence at a time."""
    here = device.device_name()
    leaves = torch_reference.leaves(params.to(here), dims, torch.float64)
    total, sequences = 0.0, [row for w in batches for row in w]
    for row in sequences:
        tokens = torch.from_numpy(row.astype(np.int64))[None].to(here)
        shifted = tokens[:, :-1], tokens[:, 1:]
        loss = torch_reference.gpt2_loss(leaves, *shifted, dims["V"], dims["NH"]) / len(sequences)
        loss.backward()
        total += loss.item()
    found = {}
    for name, leaf, _ in torch_reference.tensors(leaves, dims):
        assert leaf.grad is not None
        found[name] = leaf.grad.cpu()
    return total, found


def products(g: Tensor, e: Tensor) -> tuple[float, ...]:
    """Return g e, g g, e e and (g - e)(g - e), in float64."""
    g, e = (t.flatten().to(device.device_name(), torch.float64) for t in (g, e))
    return tuple(torch.dot(a, b).item() for a, b in ((g, e), (g, g), (e, e), (g - e, g - e)))


def agreement(tensors: Sequence[tuple[float, ...]]) -> Agreement:
    """Return the agreement of several tensors from the `products` of each."""
    along = [ge / ee for ge, _, ee, _ in tensors]
    cosine = min(ge / math.sqrt(gg * ee) for ge, gg, ee, _ in tensors)
    return Agreement(
        cosine, (min(along), max(along)), max(math.sqrt(dd / ee) for _, _, ee, dd in tensors)
    )


def by_kind(found: Gradients, want: Gradients) -> dict[str, Agreement]:
    """Return the agreement of each kind of tensor (q, k and v are three kinds), and of
    all tensors taken as one.
    """
    kinds: dict[str, list[tuple[float, ...]]] = {}
    for name, g in found.items():
        kind = name.partition("[")[0]
        e = want[name]
        parts = zip("qkv", g.chunk(3), e.chunk(3), strict=True) if kind == "qkvw" else [("", g, e)]
        for part, some, exactly in parts:
            kinds.setdefault(f"{part}w" if part else kind, []).append(products(some, exactly))
    every = [values for tensors in kinds.values() for values in tensors]
    whole = tuple(math.fsum(column) for column in zip(*every, strict=True))
    return {kind: agreement(tensors) for kind, tensors in kinds.items()} | {
        "all": agreement([whole])
    }


def report(name: str, loss: float, exact_loss: float, kinds: dict[str, Agreement]) -> None:
    print(f"{name}: loss {loss:.5f} ({loss - exact_loss:+.5f})")
    for kind, a in kinds.items():
        along = f"along {a.along[0]:.4f} .. {a.along[1]:.4f}"
        print(f"  {kind:<10}cosine {a.cosine:.5f}  {along}  error {a.error:.4f}", flush=True)


@app.default
def compare(run: str, *, data: str, batch: Count = 2, batches: Count = 4) -> None:
    """Compare the gradients of bf16 and fp8 with float64's at the weights of a run.

    Args:
        run: Run directory, checkpoint or another project's model, as `sample` takes.
        data: Glob of the shards.
        batch: Sequences of a micro-batch.
        batches: Micro-batches.
    """
    if not (device.present() or INTERPRET):
        raise ConfigError(
            "gradients: needs a CUDA GPU, found none; "
            "TRITON_INTERPRET=1 runs the kernels on the CPU"
        )
    saved, stored, _ = load_weights(run)
    params = stored["params"].whole().to(torch.bfloat16)
    configs = configs_of(saved, batch, batches)
    batched, others = (windows(data, configs["bf16"], batches, first) for first in (0, batches))
    found = {name: ours(config, params, batched) for name, config in configs.items()}
    dims = found["bf16"][2]
    exact_loss, want = exact(params, dims, batched)
    for name, (loss, gradients, _) in found.items():
        report(name, loss, exact_loss, by_kind(gradients, want))
    loss, gradients = exact(params, dims, others)
    report("float64, other batches", loss, exact_loss, by_kind(gradients, want))


if __name__ == "__main__":
    sys.exit(commands.main(app, sys.argv[1:]))
