"""Llama 3 and Qwen3 in PyTorch, written to be fast on one GPU; torch_gpt2.py times it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.model.llama.rope import table

CHUNKS = 4  # of the loss: a chunk's logits take 1 GiB for 4,096 tokens of 128,256


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        C, self.HS = c.n_embd, c.head_size
        self.ln_1 = nn.RMSNorm(C, c.norm_eps)
        self.ln_2 = nn.RMSNorm(C, c.norm_eps)
        self.sections = c.q_channels, c.kv_channels, c.kv_channels
        self.qkv = nn.Linear(C, sum(self.sections), bias=False)
        self.attproj = nn.Linear(c.q_channels, C, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.HS, c.norm_eps) if c.qk_norm else nn.Identity() for _ in "qk"
        )
        self.fc = nn.Linear(C, 2 * c.inner, bias=False)
        self.fcproj = nn.Linear(c.inner, C, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        parts = self.qkv(self.ln_1(x)).split(self.sections, -1)
        q, k, v = (part.view(B, T, -1, self.HS).transpose(1, 2) for part in parts)
        q, k = (rotated(part, cos, sin) for part in (self.q_norm(q), self.k_norm(k)))
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attproj(att.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.fc(self.ln_2(x)).chunk(2, -1)
        return x + self.fcproj(F.silu(gate) * up)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        C = c.n_embd
        self.cap = c.logit_cap
        self.wte = nn.Embedding(c.padded_vocab, C)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.RMSNorm(C, c.norm_eps)
        self.head = nn.Linear(C, c.padded_vocab, bias=False)
        if c.tied:
            self.head.weight = self.wte.weight
        rope = table(c.block_size, c.head_size, c.rope_theta, c.rope_factor)
        self.register_buffer("rope", torch.from_numpy(rope))
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02)

    def logits(self, rows: Tensor) -> Tensor:
        z = self.head(rows)
        return self.cap * torch.tanh(z.float() / self.cap) if self.cap else z

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids)
        cos, sin = self.rope[: ids.shape[1]].chunk(2, -1)
        for layer in self.layers:
            x = layer(x, cos, sin)
        chunks = zip(self.ln_f(x).flatten(0, 1).chunk(CHUNKS), targets.view(-1).chunk(CHUNKS))
        losses = [F.cross_entropy(self.logits(rows), of, reduction="sum") for rows, of in chunks]
        return sum(losses, torch.zeros((), device=x.device)) / targets.numel()
