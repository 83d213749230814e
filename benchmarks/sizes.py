"""The four sizes of GPT-2, as the benchmarks run them: T = 1024, one step an update of B sequences."""

from typing import NamedTuple

import numpy as np

from gpt2_triton.config.config import Config

T, VOCAB = 1024, 50257


class Size(NamedTuple):
    n_layer: int
    n_head: int
    n_embd: int
    batch: int
    recompute: str  # the fastest level within the memory that the figures in docs/performance.md aim at


SIZES = {
    "d12": Size(12, 12, 768, 64, "gelu"),
    "d24": Size(24, 16, 1024, 64, "gelu+ln"),
    "d36": Size(36, 20, 1280, 32, "gelu+ln"),
    "d48": Size(48, 25, 1600, 16, "gelu+ln"),
}


def config_of(size: str, batch: int, recompute: str, n_layer: int | None = None) -> Config:
    """bf16 with stochastic rounding, as a run without options trains; all layers, or so many."""
    s = SIZES[size]
    return Config.model_validate(
        dict(
            model=dict(n_layer=n_layer or s.n_layer, n_head=s.n_head, n_embd=s.n_embd),
            train=dict(batch_size=batch, seq_len=T),
            optim=dict(lr=3e-4, warmup=0, schedule="constant"),
            memory=dict(recompute=recompute),
        )
    )


def tokens_of(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ids and targets [batch, T], the same for everybody."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (batch, T + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]
