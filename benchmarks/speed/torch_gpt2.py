"""GPT-2 in PyTorch, written to be fast on one GPU: the baseline of
`python -m benchmarks steps`, also for Llama 3.

Pure bf16, vocabulary padded to a multiple of 128, cuDNN attention, torch.compile, fused AdamW with
gradient clipping, no host synchronisation between steps.  Prints one JSON line.

    python -m benchmarks.speed.torch_gpt2 SIZE BATCH STEPS START [--fp8 rowwise]
        [--optim muon] [--weights fp32]

--fp8 names a recipe of torchao, which computes the layers' products in fp8.  torchao must be built
for the installed torch.  With --optim muon, torch.optim.Muon updates the layers' matrices, and
AdamW the rest.  --weights fp32 computes under bf16 autocast.  --micro_steps 2 adds up the
gradients of two batches in a step.  --chunks 8 computes GPT-2's loss in eight parts, and each
part's logits again in the backward pass.
"""

import argparse
import functools
import json
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.speed.energy import Power
from benchmarks.speed.floors import ATTENTION
from benchmarks.speed.sizes import SIZES, tokens_of, work_of
from benchmarks.speed.torch_llama import Llama
from benchmarks.torch_reference import ACTIVATIONS
from gpt2_triton.config.schema import ModelConfig


class Block(nn.Module):
    def __init__(self, C: int, NH: int, act: str):
        super().__init__()
        self.NH = NH
        self.activation = ACTIVATIONS[act]
        self.ln_1 = nn.LayerNorm(C)
        self.ln_2 = nn.LayerNorm(C)
        self.qkv = nn.Linear(C, 3 * C)
        self.attproj = nn.Linear(C, C)
        self.fc = nn.Linear(C, 4 * C)
        self.fcproj = nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, self.NH, C // self.NH).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(att.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(self.activation(self.fc(self.ln_2(x))))


class GPT2(nn.Module):
    chunks = 1

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, Vp = config.n_embd, config.padded_vocab
        self.wte = nn.Embedding(Vp, C)
        self.wpe = nn.Embedding(config.block_size, C)
        self.layers = nn.ModuleList(
            Block(C, config.n_head, config.activation) for _ in range(config.n_layer)
        )
        self.ln_f = nn.LayerNorm(C)
        self.head = nn.Linear(C, Vp, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        rows = self.ln_f(x).flatten(0, 1)
        of = targets.view(-1)
        if self.chunks == 1:
            return F.cross_entropy(self.head(rows), of)
        parts = zip(rows.chunk(self.chunks), of.chunk(self.chunks))
        losses = [checkpoint(self.loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / of.numel()

    def loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(rows), targets, reduction="sum")


def build(size: str, optim: str = "adamw") -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Return a model in bf16 and its optimizers: AdamW; with `muon` torch.optim.Muon for
    the matrices of the layers.
    """
    torch.manual_seed(0)
    config = work_of(size).config().model
    model = (GPT2 if config.arch == "gpt2" else Llama)(config).cuda().bfloat16()
    inside = {
        name: p
        for name, p in model.named_parameters()
        if name.startswith("layers.") and p.dim() == 2
    }
    inside = inside if optim == "muon" else {}
    rest = [p for name, p in model.named_parameters() if name not in inside]
    adamw = torch.optim.AdamW(rest, lr=3e-4, fused=True, betas=(0.9, 0.95), weight_decay=0.1)
    return model, [
        adamw,
        *([torch.optim.Muon(inside.values(), lr=3e-4, weight_decay=0.1)] if inside else ()),
    ]


def run_steps(
    model: Any,
    optimizers: list[Any],
    batch: tuple[Tensor, Tensor],
    steps: int,
    micro_steps: int = 1,
) -> tuple[list[float], Tensor]:
    """Run steps; return the milliseconds of each and the last loss."""
    autocast = torch.autocast(
        "cuda", torch.bfloat16, enabled=next(model.parameters()).dtype == torch.float32
    )
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    with sdpa_kernel(ATTENTION):
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(micro_steps):
                with autocast:
                    loss = model(*batch)
                (loss / micro_steps).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:])], loss


def in_float8(model: nn.Module, recipe: str) -> nn.Module:
    """Replace the layers' linears, but not the head, by torchao's linears of a
    recipe; return the model.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda _, name: "layers." in name,
    )


def batch_of(size: str, batch: int) -> tuple[Tensor, Tensor]:
    tokens = tokens_of(work_of(size, batch).config())
    ids, targets = (torch.from_numpy(t.astype("int64")).cuda() for t in tokens)
    return ids, targets


def main(a: argparse.Namespace) -> None:
    model, optimizers = build(a.size, a.optim)
    model.chunks = a.chunks
    if a.weights == "fp32":
        model.float()
    if a.fp8:
        in_float8(model, a.fp8)
    compiled = torch.compile(model)
    tokens = batch_of(a.size, a.batch)
    run = functools.partial(run_steps, compiled, optimizers, tokens, micro_steps=a.micro_steps)
    run(1)
    first_step = time.time() - a.start
    run(4)
    with Power() as power:
        times, loss = run(a.steps - 5)
    ms = statistics.median(times)
    report = dict(
        ms=ms, joules=power.joules(ms / 1e3), gib=torch.cuda.max_memory_allocated() / 2**30
    )
    print(json.dumps(report | dict(first_step=first_step, loss=loss.item())), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("batch", type=int)
    parser.add_argument("steps", type=int, help="the first five are not counted")
    parser.add_argument("start", type=float, help="time.time() when the process was started")
    parser.add_argument(
        "--fp8", choices=("tensorwise", "rowwise"), help="torchao's recipe for the layers' products"
    )
    parser.add_argument("--optim", choices=("adamw", "muon"), default="adamw")
    parser.add_argument(
        "--weights", choices=("bf16", "fp32"), default="bf16", help="fp32 computes under autocast"
    )
    parser.add_argument("--micro_steps", type=int, default=1, help="batches in a step")
    parser.add_argument(
        "--chunks", type=int, default=1, help="pieces in which GPT-2's loss is computed"
    )
    main(parser.parse_args())
