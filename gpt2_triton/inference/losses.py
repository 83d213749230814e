"""Losses over token shards: the validation loss of a run, the perplexity of a checkpoint."""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpt2_triton.config.config import Config
from gpt2_triton.console import Progress
from gpt2_triton.data.loader import ValidationLoader
from gpt2_triton.data.shards import Shard
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import DataError, bad_data
from gpt2_triton.model.gpt2 import GPT2


def validation_loss(
    model: GPT2, loader: ValidationLoader, control: ControlGroup = SINGLE_PROCESS, fp8: bool = False
) -> float:
    """Return the mean loss of a run's validation tokens, with `fp8` that of the forward pass of an fp8 step.  Rank r of
    `control` computes every size-th batch from r.
    """
    total, batches = 0.0, loader.batches(model.B)
    for ids, targets in itertools.islice(batches, control.rank, None, control.size):
        total += float(model.evaluate(ids, targets, fp8).numpy().sum(dtype=np.float64))
    return sum(control.all_gather(total)) / loader.tokens


class Perplexity(NamedTuple):
    """The mean loss of `tokens` targets in nats, its exponential, and the loss in bits per byte of their text."""

    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None


def perplexity(model: GPT2, shards: Sequence[Shard], tokens: int) -> Perplexity:
    """Return the perplexity of the first `tokens` tokens of `shards` (0: all), in windows of seq_len as in validation.

    Bits per byte leave out the end-of-text token, which has no bytes.
    """
    byte_lengths = _byte_lengths(model.config)
    most = sum((len(shard.tokens) - 1) // model.T for shard in shards) * model.T
    if tokens and not model.T <= tokens <= most:
        expected, todo = f"0, or {model.T:,} (one window) to {most:,}", "change it or name more shards"
        raise bad_data("--tokens", "does not suit these shards", f"{tokens:,}", expected, todo)
    loader = ValidationLoader(shards, model.T, tokens)
    total, of_text, text_bytes = 0.0, 0.0, 0
    with Progress("perplexity", loader.tokens, "tokens") as progress:
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


def _byte_lengths(config: Config) -> np.ndarray | None:
    """Return the bytes of text of every token id, 0 for the end of text and for ids beyond the tokenizer's.

    If the tokenizer is not available, print a warning and return None.
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
