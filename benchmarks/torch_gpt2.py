"""GPT-2 in PyTorch, as fast as PyTorch is on one GPU: what `python -m gpt2_triton bench` measures itself against.

Pure bf16, vocabulary padded to 128, cuDNN attention, torch.compile, fused AdamW with gradient clipping; no host
synchronisation between steps.  Prints one JSON line.

    python -m benchmarks.torch_gpt2 SIZE BATCH STEPS START     START: time.time() when the process was started
"""

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.sizes import SIZES, VOCAB, Size, T, tokens_of

PADDED = -(-VOCAB // 128) * 128


class Block(nn.Module):
    def __init__(self, C: int, NH: int):
        super().__init__()
        self.NH = NH
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, self.NH, C // self.NH).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(att.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        C = size.n_embd
        self.wte, self.wpe = nn.Embedding(PADDED, C), nn.Embedding(T, C)
        self.layers = nn.ModuleList(Block(C, size.n_head) for _ in range(size.n_layer))
        self.ln_f = nn.LayerNorm(C)
        self.head = nn.Linear(C, PADDED, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.ln_f(x)).view(-1, PADDED), targets.view(-1))


def main(size: str, batch: int, steps: int, start: float) -> None:
    torch.manual_seed(0)
    model = GPT2(SIZES[size]).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True, betas=(0.9, 0.95), weight_decay=0.1)
    ids, targets = (torch.from_numpy(t.astype("int64")).cuda() for t in tokens_of(batch))
    compiled = torch.compile(model)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    first_step = 0.0
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        marks[0].record()
        for step in range(steps):
            loss = compiled(ids, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            marks[step + 1].record()
            if step == 0:
                torch.cuda.synchronize()
                first_step = time.time() - start
    torch.cuda.synchronize()
    ms = [a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:])]
    report = dict(ms=statistics.median(ms[5:]), gib=torch.cuda.max_memory_allocated() / 2**30, first_step=first_step)
    print(json.dumps(report | dict(loss=loss.item())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
