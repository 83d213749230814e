"""Trains a configuration with PyTorch as nanoGPT does: fp32 weights, bf16
autocast, torch.compile.

    python -m benchmarks.losses.torch_train CONFIG --run_dir DIR
        [--fp32] [--KEY VALUE]

Initial weights, batches and learning rates are the same as in `gpt2-triton
train` with these options on one GPU.  AdamW is fused.  With optim.name muon,
torch.optim.Muon updates the layers' matrices: q, k and v apart, and Llama's
gate and value.  The model is torch_gpt2.GPT2 or torch_llama.Llama with cuDNN's
attention; the loss leaves out the vocabulary's padding.  With --fp32, or with
train.dtype fp32, it computes in fp32 without TF32 and without torch.compile.
Without a GPU it trains on the CPU.  DIR receives run.json and metrics.jsonl,
which ends with the validation loss, but no checkpoints.
"""

import contextlib
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from benchmarks.runs import Keys
from benchmarks.speed.floors import ATTENTION
from benchmarks.speed.torch_gpt2 import GPT2
from benchmarks.speed.torch_llama import Llama
from gpt2_triton.commands.app import main, make_app, select_device
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import Progress
from gpt2_triton.data.loader import TrainLoader, ValidationLoader
from gpt2_triton.data.prepare.builtin import pattern_of
from gpt2_triton.data.shards import Shard, open_shards
from gpt2_triton.device import device_name
from gpt2_triton.errors import ConfigError
from gpt2_triton.model.tables import param_views
from gpt2_triton.training.metrics import METRICS

EMBEDDINGS = ("wte", "wpe", "head")  # what optim.embed_lr is of; a tied head is wte
SYNC = 20  # steps that may be launched before the host waits for their losses

app = make_app("python -m benchmarks.losses.torch_train")
app.help_epilogue = __doc__
Module = GPT2 | Llama
Batch = tuple[Tensor, Tensor]  # ids and targets, int64 [B, T]
# index, loss and gradient norm on the device, learning rate
Step = tuple[int, Tensor, Tensor, float]


def model_of(m: ModelConfig) -> Module:
    """Return GPT-2 or Llama in PyTorch; its loss leaves out the padding of the vocabulary."""
    model = GPT2(m) if m.arch == "gpt2" else Llama(m)
    model.head.register_forward_hook(lambda head, inputs, logits: logits[..., : m.vocab_size])
    return model


def by_name(p: Any) -> dict[str, Tensor]:
    """Return our parameters by the names of PyTorch's model."""
    found = {}
    for name, value in vars(p).items():
        kind = "bias" if name.endswith("b") else "weight"
        if name in ("wte", "wpe"):
            found[f"{name}.weight"] = value
        elif name == "lmhead":
            found["head.weight"] = value
        elif name == "qknormw":
            for l, (q, k) in enumerate([] if value is None else value):
                found |= {f"layers.{l}.q_norm.weight": q, f"layers.{l}.k_norm.weight": k}
        elif name in ("lnw", "lnb"):
            norms = [f"layers.{i // 2}.ln_{i % 2 + 1}" for i in range(len(value) - 1)]
            rows = zip([*norms, "ln_f"], value, strict=True)
            found |= {f"{norm}.{kind}": row for norm, row in rows}
        else:
            found |= {f"layers.{l}.{name[:-1]}.{kind}": layer for l, layer in enumerate(value)}
    return found


def model_like_ours(config: Config) -> Module:
    """Return PyTorch's model on this device, with the initial weights of `gpt2-triton train`."""
    import gpt2_triton.kernels as K  # after select_device
    from gpt2_triton.model import architecture
    from gpt2_triton.model.model import Model

    # auto needs a step
    config = config.replace(train={"precision": "bf16"}, memory={"recompute": "gelu+ln"})
    # in fp32 the same weights are one tensor, not bf16 and master bits
    if config.optim.master == "fp32":
        config = config.replace(train={"dtype": "fp32"}, optim={"master": "none"})
    ours = Model(config, K, device_name())
    ours.initialise(config.train.seed)
    params = ours.state.params.to("cpu", copy=True)
    weights = by_name(param_views(architecture.of(config.model).Params, params, ours.dims))
    del ours
    gc.collect()  # frees its arena
    torch.cuda.empty_cache()
    model = model_of(config.model)
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"head.weight", "rope"}  # what no parameter is
    return model.to(device_name())


def parts_of(weight: nn.Parameter, rows: list[int]) -> list[nn.Parameter]:
    """Return views of some rows of a weight each, with gradients: Muon is better on q, k and v,
    and on gate and value, than on one matrix.
    """
    parts = [nn.Parameter(part) for part in weight.detach().split(rows)]

    def share_gradient(weight: Tensor) -> None:
        assert weight.grad is not None
        for part, grad in zip(parts, weight.grad.split(rows), strict=True):
            part.grad = grad

    weight.register_post_accumulate_grad_hook(share_gradient)
    return parts


def optimizers_of(model: Module, config: Config) -> list[torch.optim.Optimizer]:
    """Return AdamW, and Muon if the configuration has it; a group's `factor`
    scales the learning rate.
    """
    o, m = config.optim, config.model
    rest = dict(model.named_parameters())
    embeddings = [rest.pop(name) for name in [*rest] if name.startswith(EMBEDDINGS)]
    beside = (o.adamw_lr or o.lr) / o.lr
    groups = [
        dict(params=embeddings, weight_decay=config.embed_decay, factor=o.embed_lr * beside),
        dict(params=[p for p in rest.values() if p.dim() < 2], weight_decay=0.0, factor=beside),
    ]
    matrices = {name: p for name, p in rest.items() if p.dim() == 2}
    optimizers: list[torch.optim.Optimizer] = []
    if o.name not in ("adamw", "muon"):
        raise ConfigError(f"optim.name: PyTorch's run has no {o.name}; choose adamw or muon")
    if o.name == "muon":
        rows = {"qkv": [m.q_channels, m.kv_channels, m.kv_channels]}
        if m.arch == "llama":
            rows["fc"] = [m.inner, m.inner]
        split = [
            parts_of(p, rows.get(name.split(".")[-2], [len(p)])) for name, p in matrices.items()
        ]
        muon: Any = dict(
            momentum=o.momentum, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(torch.optim.Muon([dict(params=sum(split, []), factor=1.0)], **muon))
    else:
        groups.append(
            dict(params=[*matrices.values()], weight_decay=config.weight_decay, factor=1.0)
        )
    fused = device_name() == "cuda"
    return [
        *optimizers,
        torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps, fused=fused),
    ]


def shards_of(config: Config, split: str) -> list[Shard]:
    pattern = pattern_of(getattr(config.data, split), split, config.data.tokenizer)
    return open_shards(pattern, config.model.vocab_size, config.train.seq_len)


def on_device(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens).to(device_name(), non_blocking=True).long()


def micro_batches(config: Config, shape: StepShape) -> Iterator[Batch]:
    """Yield all micro-batches of a run."""
    T, B = config.train.seq_len, shape.micro_batch
    loader = TrainLoader(
        shards_of(config, "train"), T, config.data.seed, config.data.windows == "shifted"
    )
    for i in range(config.train.steps * shape.accumulation):
        tokens = on_device(loader.batch(i * B, B))
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def autocast(fp32: bool) -> torch.autocast:
    return torch.autocast(device_name(), torch.bfloat16, enabled=not fp32)


def train_steps(
    config: Config,
    model: Module,
    loss_of: Callable[..., Tensor],
    accumulation: int,
    batches: Iterator[Batch],
    fp32: bool,
) -> Iterator[Step]:
    """Train, and yield every step.  `loss_of` is the model or its compiled form."""
    from gpt2_triton.training.lr_schedule import learning_rate

    o = config.optim
    optimizers = optimizers_of(model, config)
    for step in range(config.train.steps):
        lr = learning_rate(step, o, config.train.steps)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["factor"] * lr
        total = torch.zeros((), device=device_name())
        for batch in itertools.islice(batches, accumulation):
            with autocast(fp32):
                loss = loss_of(*batch) / accumulation
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        yield step, total, norm, lr


def write_steps(config: Config, steps: Iterator[Step], file: TextIO) -> None:
    """Write the steps' records.  Each SYNC steps share their mean time in milliseconds."""
    last = time.perf_counter()
    tokens = config.train.step_tokens
    with Progress("PyTorch", config.train.steps, "steps") as progress:
        while group := list(itertools.islice(steps, SYNC)):
            losses = [loss.item() for _, loss, _, _ in group]
            now = time.perf_counter()
            ms = 1e3 * (now - last) / len(group)
            last = now
            for (i, _, norm, lr), loss in zip(group, losses, strict=True):
                record = dict(
                    step=i + 1, loss=loss, lr=lr, norm=norm.item(), ms=ms, tokens=(i + 1) * tokens
                )
                file.write(json.dumps(record) + "\n")
            progress.advance(len(group), f"loss {statistics.fmean(losses):.4f}")


@torch.no_grad()
def validation_loss(model: nn.Module, config: Config, fp32: bool) -> float:
    """Return the mean loss over the first eval.tokens tokens of the validation
    shards; eval.tokens 0 takes all.
    """
    T = config.train.seq_len
    loader = ValidationLoader(shards_of(config, "val"), T, config.eval.tokens)
    total = torch.zeros((), dtype=torch.float64, device=device_name())
    for ids, targets in loader.batches(config.train.batch_size):
        with autocast(fp32):
            total += model(on_device(ids), on_device(targets)) * len(ids)
    return total.item() / loader.count


def train(config: Config, run_dir: Path, fp32: bool) -> None:
    """Train and validate; write run.json and metrics.jsonl."""
    from gpt2_triton.training.run_info import describe_start, write_run

    shape = StepShape.of(config, 1)
    model = model_like_ours(config)
    fast = device_name() == "cuda" and not fp32
    # a CPU would compile for longer than it trains
    loss_of = torch.compile(model) if fast else model
    run_dir.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if device_name() == "cuda" else "CPU"
    write_run(run_dir, None, [describe_start(config, shape, 0, device, 0)])
    with (
        open(run_dir / METRICS, "w") as file,
        sdpa_kernel(ATTENTION) if fast else contextlib.nullcontext(),
    ):
        steps = train_steps(
            config, model, loss_of, shape.accumulation, micro_batches(config, shape), fp32
        )
        write_steps(config, steps, file)
        file.write(
            json.dumps(dict(step=config.train.steps, val_loss=validation_loss(model, config, fp32)))
            + "\n"
        )


@app.default
def command(config: str, *keys: Keys, run_dir: Path, fp32: bool = False) -> None:
    """Train a configuration with PyTorch.

    Args:
        config: Configuration file.
        keys: Keys of a configuration, as --train.steps 100.
        run_dir: Directory for metrics.jsonl and run.json.
        fp32: Compute in fp32, without autocast.
    """
    given = Config.load(config, parse_overrides(keys))
    select_device()
    train(given, run_dir, fp32 or given.train.dtype == "fp32")


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
