"""Losses over shards: the validation of a run, the perplexity of a checkpoint, whose model only runs forward."""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

import gpt2_triton.kernels as K
from gpt2_triton.config.config import Config
from gpt2_triton.data.loader import ValidationLoader
from gpt2_triton.data.progress import Progress
from gpt2_triton.data.shards import Shard
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.device import device_name
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import DataError, bad_data
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.memory_plan import free_bytes, largest_batch, plan_memory


def load_for_losses(config: Config, tensors: dict[str, Tensor], tokens: int, dtype: str | None = None) -> GPT2:
    """A model with the weights `params` among `tensors`, its kernels compiled, in an arena for `tokens` tokens at once:
    rounded down to whole sequences of seq_len, less if the GPU has no room for them, but a sequence of block_size fits.
    With a `dtype`, bf16 or fp32, it computes in that one.
    """
    if dtype:
        config = config.replace(train={"dtype": dtype}, optim={"master": "none"})
    device, T = device_name(), config.train.seq_len
    batch, least = tokens // T, -(-config.model.block_size // T)
    if device == "cuda":
        batch = min(batch, _fitting_batch(config, free_bytes(device)))
    batch = max(batch, least)
    model = GPT2(config, K, device, batch=batch, training=False)
    model.state.params.copy_(tensors["params"])
    if device == "cuda":
        with K.compiling():
            model.evaluate(*np.zeros((2, model.B, model.T), np.int32))
    return model


def _fitting_batch(config: Config, budget: int) -> int:
    T = config.train.seq_len
    return largest_batch(lambda B: plan_memory(config, K, B, T, training=False)[0].total, budget)


def _byte_lengths(config: Config) -> np.ndarray | None:
    """Bytes of text of every token of the vocabulary, 0 for the end of text and for those that the tokenizer has not;
    None, with a warning, where the tokenizer cannot be had.
    """
    try:
        tokenizer = get_tokenizer(config.data.tokenizer)
    except DataError as error:
        print(f"warning: no bits per byte: {error}", file=sys.stderr, flush=True)
        return None
    lengths = np.zeros(config.model.vocab_size, np.int64)
    lengths[: tokenizer.vocab_size] = [len(token) for token in tokenizer.token_bytes()]
    lengths[tokenizer.eot] = 0
    return lengths


def validation_loss(model: GPT2, loader: ValidationLoader, control: ControlGroup = SINGLE_PROCESS) -> float:
    """The mean loss of a run's validation tokens, whose batches the ranks of a control take in turn."""
    total, batches = 0.0, loader.batches(model.B)
    for ids, targets in itertools.islice(batches, control.rank, None, control.size):
        total += float(model.evaluate(ids, targets).numpy().sum(dtype=np.float64))
    return sum(control.all_gather(total)) / loader.tokens


class Perplexity(NamedTuple):
    """The mean loss of `tokens` targets, in nats, and its exponential; bits per byte of the text they stand for."""

    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None


def perplexity(model: GPT2, shards: Sequence[Shard], tokens: int) -> Perplexity:
    """Of the first `tokens` tokens of `shards` (0: all), in windows of seq_len, as validation takes them.

    Bits per byte count the losses of tokens that have bytes: not those of the end-of-text token, which is no text.
    """
    byte_lengths = _byte_lengths(model.config)
    most = sum((len(shard.tokens) - 1) // model.T for shard in shards) * model.T
    if tokens and not model.T <= tokens <= most:
        expected, todo = f"0, or {model.T:,} (one window) to {most:,}", "change it or name more shards"
        raise bad_data("--tokens", "does not suit these shards", f"{tokens:,}", expected, todo)
    loader = ValidationLoader(shards, model.T, tokens)
    progress = Progress("perplexity", loader.tokens, "tokens")
    total, of_text, text_bytes = 0.0, 0.0, 0
    for ids, targets in loader.batches(model.B):
        losses = model.evaluate(ids, targets).numpy().astype(np.float64)
        total += float(losses.sum())
        if byte_lengths is not None:
            lengths = byte_lengths[targets.reshape(-1)]
            of_text += float(losses[lengths > 0].sum())
            text_bytes += int(lengths.sum())
        progress.advance(ids.size)
    loss = total / loader.tokens
    bits_per_byte = of_text / text_bytes / math.log(2) if text_bytes else None
    return Perplexity(loader.tokens, loss, math.exp(loss), bits_per_byte)
