"""GPT-2 in PyTorch, written to be fast on one GPU: the baseline of
`python -m benchmarks steps`, also for Llama 3.

Pure bf16, vocabulary padded to a multiple of 128, cuDNN attention, torch.compile, fused AdamW with
gradient clipping, no host synchronisation between steps.  Prints one JSON line.  torchao must be
built for the installed torch.

    python -m benchmarks.speed.torch_gpt2 SIZE BATCH STEPS START [--fp8 rowwise]
        [--optim muon] [--weights fp32] ...
"""

import functools
import json
import statistics
import sys
import time
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.activations import ACTIVATIONS
from benchmarks.speed.energy import Power
from benchmarks.speed.floors import ATTENTION
from benchmarks.speed.sizes import tokens_of, work_of
from benchmarks.speed.torch_llama import Llama
from gpt2_triton.commands.app import AT_LEAST_1, main, make_app
from gpt2_triton.config.schema import ModelConfig

app = make_app("python -m benchmarks.speed.torch_gpt2")


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


@app.default
def time_steps(
    size: str,
    batch: Annotated[int, AT_LEAST_1],
    steps: int,
    start: float,
    *,
    fp8: Literal["tensorwise", "rowwise"] | None = None,
    optim: Literal["adamw", "muon"] = "adamw",
    weights: Literal["bf16", "fp32"] = "bf16",
    micro_steps: Annotated[int, AT_LEAST_1] = 1,
    chunks: Annotated[int, AT_LEAST_1] = 1,
) -> None:
    """Time steps of PyTorch, and print one line of JSON.

    Args:
        size: As those of `python -m benchmarks steps`.
        batch: Sequences of a batch.
        steps: Steps; the first five are not counted.
        start: time.time() when the process was started.
        fp8: torchao's recipe for the layers' products.
        optim: With muon, torch.optim.Muon updates the layers' matrices, and AdamW the rest.
        weights: fp32 computes under bf16 autocast.
        micro_steps: Batches in a step, whose gradients are added up.
        chunks: Parts of GPT-2's loss; the backward pass computes each part's logits again.
    """
    model, optimizers = build(size, optim)
    model.chunks = chunks
    if weights == "fp32":
        model.float()
    if fp8:
        in_float8(model, fp8)
    compiled = torch.compile(model)
    tokens = batch_of(size, batch)
    run = functools.partial(run_steps, compiled, optimizers, tokens, micro_steps=micro_steps)
    run(1)
    first_step = time.time() - start
    run(4)
    with Power() as power:
        times, loss = run(steps - 5)
    ms = statistics.median(times)
    report = dict(
        ms=ms, joules=power.joules(ms / 1e3), gib=torch.cuda.max_memory_allocated() / 2**30
    )
    print(json.dumps(report | dict(first_step=first_step, loss=loss.item())), flush=True)


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
