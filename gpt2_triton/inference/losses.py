"""Losses over tokens: a run's validation loss, a checkpoint's perplexity, the
loss of single sequences.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from gpt2_triton.config.config import Config
from gpt2_triton.console import Progress, print_line
from gpt2_triton.data.loader import ValidationLoader
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import DataError, same_on_all_ranks
from gpt2_triton.model.forward import padded_length
from gpt2_triton.model.model import Model


class Stopped(Exception):
    """An evaluation was broken off on all ranks, because one rank asked for it."""


def validation_loss(
    model: Model,
    loader: ValidationLoader,
    control: ControlGroup = SINGLE_PROCESS,
    stop: Callable[[], bool] = lambda: False,
    fp8: bool = False,
) -> float:
    """Return the mean loss of a run's validation tokens.  With `fp8` the forward pass is in fp8.

    Each rank computes a part of the batches, rank r the batches r, r + size, r + 2 * size, ...
    If one rank cannot read its batches, all ranks raise DataError; if `stop` is
    True on one, all raise Stopped.
    """
    total = 0.0
    wrong = ""
    stopped = False
    try:
        for ids, targets in loader.batches(model.B, control.rank, control.size):
            stopped = stop()
            if stopped:
                break
            total += float(model.evaluate(ids, targets, fp8).numpy().sum(dtype=np.float64))
    except DataError as error:  # the other ranks wait for this one
        wrong = str(error)
    found = control.all_gather([total, wrong, stopped])
    if errors := [wrong for _, wrong, _ in found if wrong]:
        with same_on_all_ranks():
            raise DataError(errors[0])
    if any(stopped for *_, stopped in found):
        raise Stopped
    return sum(total for total, *_ in found) / loader.tokens


class Perplexity(NamedTuple):
    """The mean loss of `tokens` targets in nats, its exponential, and the loss
    in bits per byte of text.
    """

    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None


def perplexity(model: Model, loader: ValidationLoader) -> Perplexity:
    """Return the perplexity of a loader's tokens, in windows of seq_len as in validation.

    Bits per byte leave out special tokens, which have no bytes.
    """
    byte_lengths = _byte_lengths(model.config)
    total = of_text = 0.0
    text_bytes = 0
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


def mean_loss(model: Model, tokens: np.ndarray) -> float:
    """Return one mean loss: over all sequences, without their first tokens; tokens:
    int32 [sequences, n], n >= 2.

    Sequences longer than model.T + 1 are cut into windows, as in `perplexity`.  The model predicts
    a token from its window alone.  The last window may be shorter.
    """
    ids = tokens[:, :-1]
    targets = tokens[:, 1:]
    whole = ids.shape[1] // model.T * model.T
    windows = ids[:, :whole].reshape(-1, model.T)
    total = _summed_loss(model, windows, targets[:, :whole].reshape(-1, model.T))
    total += _summed_loss(model, ids[:, whole:], targets[:, whole:])
    return total / ids.size


def _summed_loss(model: Model, ids: np.ndarray, targets: np.ndarray) -> float:
    """Return the sum of the losses of sequences [rows, n], n at most model.T."""
    n = ids.shape[1]
    total = 0.0
    for rows, padded in padded_batches(model, ids):
        padded_targets = np.full_like(padded, -1)
        padded_targets[:, :n] = targets[rows]
        total += float(model.evaluate(padded, padded_targets).numpy().sum(dtype=np.float64))
    return total


def logits(model: Model, tokens: np.ndarray, start: int) -> np.ndarray:
    """Return the logits after each token from position `start` on, fp32 [sequences, n - start, V];
    tokens: int32 [sequences, n], n at most model.T.
    """
    n = tokens.shape[1]
    parts = [model.logits(padded, start, n) for _, padded in padded_batches(model, tokens)]
    return np.concatenate(parts)


def padded_batches(model: Model, ids: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield `ids` [all, n] in batches that fit the model, as (rows, padded ids [batch,
    T]); T is at most model.T.
    """
    n = ids.shape[1]
    if n == 0:
        return
    T = padded_length(n, model.T)
    most = model.B * model.T // T
    for first in range(0, len(ids), most):
        rows = slice(first, first + most)
        padded = np.zeros((len(ids[rows]), T), np.int32)
        padded[:, :n] = ids[rows]
        yield rows, padded


def _byte_lengths(config: Config) -> np.ndarray | None:
    """Return each token's bytes, int64 [V], 0 for special ones; None if they are not known."""
    try:
        tokenizer = get_tokenizer(config.data.tokenizer)
        of_tokens = [len(token) for token in tokenizer.token_bytes()]
    except DataError as error:
        print_line(f"warning: no bits per byte: {error}", error=True)
        return None
    lengths = np.zeros(config.model.vocab_size, np.int64)
    lengths[: tokenizer.vocab_size] = of_tokens
    special = (tokenizer.eot, *tokenizer.special.values())
    lengths[[i for i in special if i is not None]] = 0
    return lengths
