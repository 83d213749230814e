"""HellaSwag: the loss of every ending of every question, and the accuracies of choosing the smallest.

The losses of a sequence depend neither on the rest of its batch nor on padding after it: attention is causal and every
sum has a fixed order.  So batches are made for speed alone, the longest sequences first.  Each batch is padded to its
longest sequence, rounded up to 32 tokens so that all batches run through the same kernels (see matmul.py), and holds as
many sequences as fit the arena.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2_triton.config.config import Config
from gpt2_triton.console import Progress
from gpt2_triton.data.hellaswag import ENDINGS, IN_TRAINING, Questions, load_questions
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import bad_data
from gpt2_triton.model.gpt2 import GPT2

MULTIPLE = 32


def questions_of_run(config: Config) -> Questions | None:
    """Return the questions that a run answers during training, in llm.c's style; None if it answers none."""
    e = config.eval
    if not e.hellaswag_every:
        return None
    path = Path(e.hellaswag_data) if e.hellaswag_data else None
    tokenizer, style = get_tokenizer(config.data.tokenizer), "completion"
    return load_questions(path, tokenizer, e.hellaswag_limit, (style,), IN_TRAINING)[style]


class Scores(NamedTuple):
    """The fraction of `rows` questions answered correctly by the sum of losses (acc) and by the sum over the length
    (acc_norm), each with its standard error.
    """

    rows: int
    acc: float
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float


def evaluate(model: GPT2, questions: Questions, control: ControlGroup = SINGLE_PROCESS) -> Scores:
    """Return the accuracies of `model` on `questions`, divided among the ranks of `control`."""
    own = ending_losses(model, questions, shard=(control.rank, control.size))
    answered = np.flatnonzero(own)  # gather these alone: the sum of the messages is as long for any number of ranks
    losses = np.zeros(own.size)
    for places, values in control.all_gather([answered.tolist(), own.flat[answered].tolist()]):
        losses[places] = values
    return scores(questions, losses.reshape(own.shape))


def ending_losses(model: GPT2, questions: Questions, style: str = "", shard: tuple[int, int] = (0, 1)) -> np.ndarray:
    """Return the summed loss of each ending's tokens given its context, float64 [rows, 4].

    A context that is too long for the model or its arena loses its beginning, as in lm-evaluation-harness.  `shard` is
    (rank, size): compute every size-th batch from rank, and leave 0 for the others.
    """
    lengths = _lengths(model, questions)
    losses = np.zeros(len(lengths), np.float64)
    own = list(itertools.islice(_batches(model, lengths), shard[0], None, shard[1]))
    total = sum(int(lengths[chosen].sum()) for chosen, _ in own)
    with Progress(f"hellaswag {style}".rstrip(), total, "tokens") as progress:
        for chosen, T in own:
            losses[chosen] = _batch_losses(model, questions, lengths, chosen, T)
            progress.advance(int(lengths[chosen].sum()))
    return losses.reshape(-1, ENDINGS)


def _batch_losses(model: GPT2, questions: Questions, lengths: np.ndarray, chosen: np.ndarray, T: int) -> np.ndarray:
    """Return the summed losses of the endings `chosen`, in one batch of sequences padded to T."""
    ids, targets = np.zeros((len(chosen), T), np.int32), np.full((len(chosen), T), -1, np.int32)
    for row, i in enumerate(chosen.tolist()):
        n, ending = lengths[i], questions.endings[i]
        ids[row, :n] = np.concatenate([questions.contexts[i // ENDINGS], ending])[-n - 1 : -1]
        targets[row, n - len(ending) : n] = ending
    each = model.evaluate(ids, targets).numpy().reshape(len(chosen), T)
    # numpy's sum pairs numbers by position, so that padding would change the last bit; cumsum adds in order
    return np.cumsum(each, 1, dtype=np.float64)[:, -1]


def shapes(model: GPT2, questions: Questions) -> set[tuple[int, int]]:
    """Return (sequences, T) of the batches that `evaluate` makes of these questions, for GPT2.compile."""
    return {(len(chosen), T) for chosen, T in _batches(model, _lengths(model, questions))}


def _longest(model: GPT2) -> int:
    return min(model.config.model.block_size, model.B * model.T)


def _lengths(model: GPT2, questions: Questions) -> np.ndarray:
    """Return the number of inputs of each ending with its context, whose last token is only a target."""
    longest = _longest(model)
    _refuse_longer(questions, longest)
    whole = [len(questions.contexts[i // ENDINGS]) + len(ending) for i, ending in enumerate(questions.endings)]
    return np.minimum(np.array(whole) - 1, longest)


def _batches(model: GPT2, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    return batches(lengths, model.B * model.T, _longest(model))


def batches(lengths: np.ndarray, budget: int, longest: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield batches as (indices of sequences, T), every sequence once, the longest first.

    T is the longest of the batch rounded up to a multiple of 32, at most `longest`; sequences * T is at most `budget`.
    """
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        T = min(-(-int(lengths[order[0]]) // MULTIPLE) * MULTIPLE, longest)
        yield order[: budget // T], T
        order = order[budget // T :]


def _refuse_longer(questions: Questions, longest: int) -> None:
    """Raise DataError for an ending that the model cannot take as a whole."""
    length = max(map(len, questions.endings))
    if length > longest:
        expected = f"{longest} or fewer, the longest input of this model"
        todo = "leave this model out, in training with eval.hellaswag_every 0"
        raise bad_data("hellaswag", "an ending too long", f"{length} tokens", expected, todo)


def predictions(questions: Questions, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the endings with the smallest loss and with the smallest loss over the length, int64 [rows] each."""
    with np.errstate(divide="ignore"):  # an ending that is empty after the clean-up is never chosen
        return losses.argmin(1), (losses / questions.lengths).argmin(1)


def scores(questions: Questions, losses: np.ndarray) -> Scores:
    """Return the accuracies of summed losses [rows, 4]."""
    rows, values = len(questions.labels), []
    for chosen in predictions(questions, losses):
        acc = float((chosen == questions.labels).mean())
        values += [acc, math.sqrt(acc * (1 - acc) / max(rows - 1, 1))]  # the sample's standard deviation / sqrt(rows)
    return Scores(rows, *values)


LABELS = {
    "completion": "the text as it is; norm: loss per token (llm.c, build-nanogpt)",
    "harness": "text cleaned up, with its activity; norm: loss per character (lm-evaluation-harness)",
}


def format_table(results: dict[str, Scores]) -> str:
    """Return a table with one line for each style."""
    lines = [f"{'style':<12}{'acc':>8}{'+-':>8}{'acc_norm':>10}{'+-':>8}"]
    for style, s in results.items():
        numbers = f"{s.acc:>8.4f}{s.acc_stderr:>8.4f}{s.acc_norm:>10.4f}{s.acc_norm_stderr:>8.4f}"
        lines.append(f"{style:<12}{numbers}  {LABELS[style]}")
    return "\n".join(lines)


def as_dict(results: dict[str, Scores]) -> dict[str, Any]:
    """Return the scores of each style for JSON."""
    return {style: scored._asdict() for style, scored in results.items()}
