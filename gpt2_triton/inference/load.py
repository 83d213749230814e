"""Build models that only run forward from loaded weights."""

from collections.abc import Mapping

import numpy as np
import torch

import gpt2_triton.kernels as K
from gpt2_triton.checkpoint.stored import StoredTensor
from gpt2_triton.checkpoint.weights import PART, read_fp32
from gpt2_triton.config.config import Config
from gpt2_triton.config.rules import LONGEST_CONTEXT
from gpt2_triton.device import device_name
from gpt2_triton.model.memory_plan import forward_shape, free_bytes, largest_batch, plan_memory
from gpt2_triton.model.model import Model


def load_for_losses(
    config: Config,
    stored: Mapping[str, StoredTensor],
    tokens: int,
    dtype: str | None = None,
    sequences: int = 0,
) -> Model:
    """Return a model with the weights of `stored` for batches of up to `tokens`
    tokens; compile its kernels.

    A batch has whole sequences of train.seq_len.  Short memory makes it smaller, down to a
    context's tokens.  The model computes in `dtype`, "bf16" or "fp32", by default in train.dtype,
    on a CPU in fp32.  It can also decode `sequences` sequences at once.
    """
    config = _computing(config, dtype)
    device = device_name()
    T = config.train.seq_len
    fitting = largest_batch(lambda B: _plan_bytes(config, B, sequences), free_bytes(device))
    of_a_context = -(-min(config.model.block_size, LONGEST_CONTEXT) // T)
    model = _load(config, stored, max(min(tokens // T, fitting), of_a_context), sequences)
    if device == "cuda":
        with K.compiling():
            model.evaluate(*np.zeros((2, model.B, model.T), np.int32))
    return model


def _computing(config: Config, dtype: str | None) -> Config:
    """Return `config` in `dtype`; on a CPU by default fp32, as the interpreter truncates bf16."""
    if dtype is None and device_name() == "cpu":
        dtype = "fp32"
    return config.replace(train={"dtype": dtype}, optim={"master": "none"}) if dtype else config


def _plan_bytes(config: Config, batch: int, sequences: int) -> int:
    shape = forward_shape(batch)
    plan, _ = plan_memory(config, K, shape, training=False, sequences=sequences)
    return plan.total


def load_for_decoding(config: Config, stored: Mapping[str, StoredTensor], sequences: int) -> Model:
    """Return a model with the weights of `stored` that decodes up to `sequences` sequences at
    once: as many as fit.
    """
    config = _computing(config, None)
    free = free_bytes(device_name())

    def batch(sequences: int) -> int:
        # a decode step's rows, one per sequence, must fit the buffers
        return -(-sequences // config.train.seq_len)

    def needed(sequences: int) -> int:
        return _plan_bytes(config, batch(sequences), sequences)

    if needed(sequences) > free:
        sequences = max(1, largest_batch(needed, free))
    return _load(config, stored, batch(sequences), sequences)


def _load(config: Config, stored: Mapping[str, StoredTensor], batch: int, sequences: int) -> Model:
    """Return a model that runs forward, its weights read part by part."""
    model = Model(config, K, device_name(), batch=batch, sequences=sequences)
    for first in range(0, stored["params"].size, PART):
        own = model.state.params[first : first + PART]
        if config.train.dtype == "fp32":  # as an export has them
            own.copy_(torch.from_numpy(read_fp32(stored, first, len(own))))
        else:
            own.copy_(stored["params"].read(first, len(own)))
    return model
