"""Trains a configuration with PyTorch as nanoGPT does: fp32 weights, bf16 autocast, torch.compile, fused AdamW.

    python -m benchmarks.torch_train [--rounding KINDS] CONFIG --run_dir DIR [--key value ...]

The initial weights, the batches and the learning rates are those of `gpt2-triton train` with the same options, on one
GPU.  The model is torch_gpt2.py's, with cuDNN's attention and the padded vocabulary.  The host does not wait for single
steps.  Writes metrics.jsonl and run.json into DIR, and after the last step the validation loss; there are no
checkpoints.  Without a GPU it trains on the CPU, with PyTorch's default attention and not compiled.

With --rounding the model is not compiled, and operands of the layers' products are rounded to e4m3: KINDS is a list of
weights, activations and gradients, each perhaps of one layer as in qkv.activations, or `none`, to compare with.  This
shows which part of fp8 costs loss: scales are those of the tensors themselves, not of earlier steps, the products are
in bf16, and no kernel is ours (torch_rounded.py).
"""

import contextlib
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from benchmarks.speed.floors import ATTENTION
from benchmarks.speed.torch_gpt2 import GPT2
from benchmarks.torch_rounded import kinds_of, round_operands
from gpt2_triton.commands.app import select_device
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import Progress
from gpt2_triton.data.loader import TrainLoader, ValidationLoader
from gpt2_triton.data.shards import open_shards
from gpt2_triton.device import device_name
from gpt2_triton.errors import ConfigError, UserError
from gpt2_triton.model.buffers import param_views
from gpt2_triton.training.metrics import METRICS

USAGE = "usage: python -m benchmarks.torch_train [--rounding KINDS] CONFIG --run_dir DIR [--key value ...]"
SYNC = 20  # steps that may be launched before the host waits for their losses

Step = tuple[int, Tensor, Tensor, float]  # index, loss and gradient norm on the device, learning rate


def model_like_ours(config: Config) -> GPT2:
    """Return PyTorch's model on this device with the weights that a run of ours begins with."""
    from benchmarks.agreement import initialised  # kernels: after select_device

    ours, flat = initialised(config)
    p = param_views(flat, ours.dims)
    del ours
    gc.collect()  # frees its arena
    torch.cuda.empty_cache()
    model = GPT2(config.model)
    norms = [norm for layer in model.layers for norm in (layer.ln_1, layer.ln_2)] + [model.ln_f]
    pairs = [(model.wte.weight, p.wte), (model.wpe.weight, p.wpe)]
    pairs += [
        pair for norm, w, b in zip(norms, p.lnw, p.lnb, strict=True) for pair in ((norm.weight, w), (norm.bias, b))
    ]
    for name, weights, biases in (
        ("qkv", p.qkvw, p.qkvb),
        ("attproj", p.attprojw, p.attprojb),
        ("fc", p.fcw, p.fcb),
        ("fcproj", p.fcprojw, p.fcprojb),
    ):
        for layer, w, b in zip(model.layers, weights, biases, strict=True):
            linear = getattr(layer, name)
            pairs += [(linear.weight, w), (linear.bias, b)]
    with torch.no_grad():
        for theirs, value in pairs:
            theirs.copy_(value)
    return model.to(device_name())


def optimizer_of(model: GPT2, config: Config) -> torch.optim.AdamW:
    """Return AdamW with the decay of matrices and embeddings; the first group's learning rate has optim.embed_lr."""
    o, embeddings = config.optim, [model.wte.weight, model.wpe.weight]
    rest = [p for name, p in model.named_parameters() if not name.startswith(("wte", "wpe", "head"))]
    groups = [
        dict(params=embeddings, weight_decay=o.weight_decay),
        dict(params=[p for p in rest if p.dim() == 2], weight_decay=o.weight_decay),
        dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0),
    ]
    fused = device_name() == "cuda"
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=fused)


def micro_batches(config: Config, shape: StepShape) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids, targets) of all micro-batches of a run, int64 [B, T] each."""
    T, B = config.train.seq_len, shape.micro_batch
    loader = TrainLoader(open_shards(config.data.train, config.model.vocab_size, T), T, config.data.seed)
    for i in range(config.train.steps * shape.accumulation):
        yield _on_device(loader.batch(i * B, B))


def _on_device(tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    found = torch.from_numpy(tokens).to(device_name(), non_blocking=True).long()
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def loss_and_gradients(loss_of: Callable[..., Tensor], batches: Iterator[tuple[Tensor, Tensor]], n: int) -> Tensor:
    """Return the mean loss of the next n micro-batches, fp32 on the device, after adding its gradients."""
    total = torch.zeros((), device=device_name())
    for _ in range(n):
        with torch.autocast(device_name(), torch.bfloat16):
            loss = loss_of(*next(batches)) / n
        loss.backward()
        total += loss.detach()
    return total


def train_steps(
    config: Config, model: GPT2, loss_of: Callable[..., Tensor], accumulation: int,
    batches: Iterator[tuple[Tensor, Tensor]],
) -> Iterator[Step]:  # fmt: skip
    """Train, and yield every step.  `loss_of` is the model, or the model compiled."""
    from gpt2_triton.training.lr_schedule import learning_rate

    o, optimizer = config.optim, optimizer_of(model, config)
    for step in range(config.train.steps):
        lr = learning_rate(step, o, config.train.steps)
        for group, factor in zip(optimizer.param_groups, (o.embed_lr, 1.0, 1.0), strict=True):
            group["lr"] = factor * lr
        loss = loss_and_gradients(loss_of, batches, accumulation)
        norm = nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield step, loss, norm, lr


def write_steps(config: Config, steps: Iterator[Step], file: TextIO) -> None:
    """Write the steps' records; SYNC steps share their mean time in milliseconds."""
    last, tokens = time.perf_counter(), config.total_batch_tokens
    with Progress("PyTorch", config.train.steps, "steps") as progress:
        while group := list(itertools.islice(steps, SYNC)):
            losses = [loss.item() for _, loss, _, _ in group]
            now = time.perf_counter()
            ms, last = 1e3 * (now - last) / len(group), now
            for (i, _, norm, lr), loss in zip(group, losses, strict=True):
                record = dict(step=i + 1, loss=loss, lr=lr, norm=norm.item(), ms=ms, tokens=(i + 1) * tokens)
                file.write(json.dumps(record) + "\n")
            progress.advance(len(group), f"loss {statistics.fmean(losses):.4f}")


def train(config: Config, run_dir: Path, rounding: Collection[str] | None = None) -> None:
    """Train and validate; write run.json and metrics.jsonl.  With `rounding`, of operands that torch_rounded.py names,
    the model is not compiled.
    """
    from gpt2_triton.training.run_info import describe_start, write_run

    shape, model = StepShape.of(config, 1), model_like_ours(config)
    on_gpu = device_name() == "cuda"
    loss_of: Callable[..., Tensor] = model
    if rounding is not None:
        round_operands(model, rounding)
    elif on_gpu:  # a CPU would compile for longer than it trains
        loss_of = torch.compile(model)
    run_dir.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    write_run(run_dir, None, [describe_start(config, shape, 0, device, 0)])
    with open(run_dir / METRICS, "w") as file, sdpa_kernel(ATTENTION) if on_gpu else contextlib.nullcontext():
        batches = micro_batches(config, shape)
        write_steps(config, train_steps(config, model, loss_of, shape.accumulation, batches), file)
        file.write(json.dumps(dict(step=config.train.steps, val_loss=validation_loss(model, config))) + "\n")


@torch.no_grad()
def validation_loss(model: nn.Module, config: Config) -> float:
    """Return the mean loss over the first eval.tokens of the validation shards, 0 for all of them."""
    T = config.train.seq_len
    loader = ValidationLoader(open_shards(config.data.val, config.model.vocab_size, T), T, config.eval.tokens)
    total = torch.zeros((), dtype=torch.float64, device=device_name())
    for ids, targets in loader.batches(config.train.batch_size):
        window = torch.from_numpy(ids).to(device_name()).long(), torch.from_numpy(targets).to(device_name()).long()
        with torch.autocast(device_name(), torch.bfloat16):
            total += model(*window) * len(ids)
    return total.item() / loader.count


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & {*words}:
        print((__doc__ or "").rstrip())
        return 0
    rounding, words = (words[1], words[2:]) if len(words) > 1 and words[0] == "--rounding" else (None, words)
    if len(words) < 3 or words[1] != "--run_dir":
        print(USAGE, file=sys.stderr)
        return 2
    try:
        kinds = None if rounding is None else kinds_of("--rounding", rounding)
        config = Config.load(words[0], parse_overrides(words[3:]))
        if config.optim.name != "adamw":
            raise ConfigError(f"optim.name {config.optim.name}: PyTorch's run has adamw only")
        select_device()
        train(config, Path(words[2]), kinds)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
