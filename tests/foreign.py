"""Models of other projects to read, checkpoints of ours to write, and what both compute."""

from pathlib import Path

import numpy as np
import torch

from gpt2_triton import checkpoint
from gpt2_triton.config import Config
from gpt2_triton.model import GPT2
from gpt2_triton.weights import by_name
from tests.conftest import DEVICE
from tests.tiny import tiny_config


def config_of(n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16, seq_len=16, **sections) -> Config:
    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=vocab_size, block_size=block_size)
    train = dict(seq_len=seq_len) | sections.pop("train", {})
    return tiny_config(model=sizes, train=train, **sections)


def random_params(config: Config, seed: int = 0) -> torch.Tensor:
    """fp32 parameters, none of them special, the padding of wte zero."""
    flat = torch.zeros(config.n_params)
    generator = torch.Generator().manual_seed(seed)
    for name, view in by_name(flat, config.model).items():
        view.copy_(torch.randn(view.shape, generator=generator) * 0.1 + (("ln" in name) and name.endswith("weight")))
    return flat


def checkpoint_of(directory: Path, config: Config, tensors: dict[str, torch.Tensor]) -> Path:
    state = {"step": 1, "config": config.to_dict(), "data": []}
    return checkpoint.save(directory / "run" / "checkpoints", 1, tensors, state, keep=0, major=0)


def token_ids(config: Config, seed: int = 0) -> np.ndarray:
    shape = (1, config.train.seq_len)
    return np.random.default_rng(seed).integers(0, config.model.vocab_size, shape, dtype=np.int32)


def our_logits(config: Config, params: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    """Logits [V] after the last token, in this project's kernels."""
    import gpt2_triton.kernels as K

    model = GPT2(config, K, DEVICE, batch=1, training=False)
    model.state.params.copy_(params)
    return model.logits(ids, ids.shape[1] - 1)
