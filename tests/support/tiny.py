"""The smallest model that uses every kernel, for tests that need a whole step."""

import numpy as np
import torch

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.model.model import Model
from tests.conftest import DEVICE

DEFAULT_NUMBERS = {"dtype": "fp32"}  # of tiny_config; pytest --precision fp8 replaces them


def tiny_config(**sections) -> Config:
    """Return a configuration of 2 layers, a head of 64, T 16, B 2 and 256
    tokens; `sections` override it.
    """
    numbers = {} if "dtype" in sections.get("train", {}) else DEFAULT_NUMBERS
    base = dict(
        model=dict(n_layer=2, n_head=1, n_embd=64, vocab_size=256, block_size=16),
        data=dict(train="builtin", val="builtin", tokenizer="bytes"),
        train=dict(steps=4, batch_size=2, seq_len=16, total_batch_tokens=None) | numbers,
        optim=dict(lr=1e-3, warmup=0, schedule="constant"),
        memory=dict(recompute="gelu"),
        eval=dict(every=0),
    )
    return Config.model_validate(merged(base, sections))


def merged(base: dict, sections: dict) -> dict:
    """Return `base` with the keys of `sections` in the place of its own."""
    return base | {
        k: base.get(k, {}) | v if isinstance(v, dict) else v for k, v in sections.items()
    }


def tiny_model(K=None, **sections):
    """Return an initialised model of tiny_config in the kernels, or in K, and its configuration."""
    if K is None:
        import gpt2_triton.kernels as K
    config = tiny_config(**sections)
    model = Model(config, K, DEVICE)
    model.initialise(seed=1)
    return model, config


def packed_batch(config: Config, seed: int = 0) -> torch.Tensor:
    """Return one micro-batch of random tokens, packed as by the loader."""
    t, rng = config.train, np.random.default_rng(seed)
    tokens = rng.integers(
        0,
        config.model.vocab_size,
        (StepShape.of(config).micro_batch, t.seq_len + 1),
        dtype=np.int32,
    )
    return pack_batch(None, tokens[:, :-1], tokens[:, 1:], config.model.vocab_size)
