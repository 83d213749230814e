"""HellaSwag: the loss of every ending of every question, in batches of like length, and the accuracies they give.

The forward pass of a sequence does not depend on what else is in its batch, nor on padding behind it: attention is
causal and every sum has its own order.  So batches are made for speed alone: the longest sequences first, each batch
as long as its longest, in multiples of 32 tokens (all of them then run through the same kernels, see matmul.py), and as
many as the arena holds.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2_triton.config.config import Config
from gpt2_triton.console import Progress
from gpt2_triton.data.hellaswag import ENDINGS, Questions, load_questions
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import bad_data
from gpt2_triton.model.gpt2 import GPT2

MULTIPLE = 32


def questions_of_run(config: Config) -> Questions | None:
    """What a run is asked as it trains, in llm.c's style; None if it is not asked."""
    e = config.eval
    if not e.hellaswag_every:
        return None
    path = Path(e.hellaswag_data) if e.hellaswag_data else None
    return load_questions(path, get_tokenizer(config.data.tokenizer), e.hellaswag_limit, ("completion",))["completion"]


class Scores(NamedTuple):
    """The fractions of `rows` questions answered rightly by sums of losses (acc) and by sums over lengths (acc_norm),
    each with its standard error.
    """

    rows: int
    acc: float
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float


def evaluate(model: GPT2, questions: Questions, control: ControlGroup = SINGLE_PROCESS) -> Scores:
    """The accuracies of `model` on `questions`, which the ranks of a control divide among themselves."""
    own = ending_losses(model, questions, turn=(control.rank, control.size))
    answered = np.flatnonzero(own)  # only these travel: the answer of all ranks is then as long for any number of them
    losses = np.zeros(own.size)
    for places, values in control.all_gather([answered.tolist(), own.flat[answered].tolist()]):
        losses[places] = values
    return scores(questions, losses.reshape(own.shape))


def ending_losses(model: GPT2, questions: Questions, style: str = "", turn: tuple[int, int] = (0, 1)) -> np.ndarray:
    """The summed loss of each ending's tokens given its context, float64 [rows, 4].

    A context loses its beginning where the model, or its arena, is too short for it, as in lm-evaluation-harness.
    """
    lengths = _lengths(model, questions)
    losses = np.zeros(len(lengths), np.float64)
    with Progress(f"hellaswag {style}".rstrip(), int(lengths.sum()), "tokens") as progress:
        for chosen, T in itertools.islice(_batches(model, lengths), turn[0], None, turn[1]):
            ids, targets = np.zeros((len(chosen), T), np.int32), np.full((len(chosen), T), -1, np.int32)
            for row, i in enumerate(chosen.tolist()):
                n, ending = lengths[i], questions.endings[i]
                ids[row, :n] = np.concatenate([questions.contexts[i // ENDINGS], ending])[-n - 1 : -1]
                targets[row, n - len(ending) : n] = ending
            each = model.evaluate(ids, targets).numpy().reshape(len(chosen), T)
            # added up in order: numpy's sum pairs numbers by their place, so that padding would change the last bit
            losses[chosen] = np.cumsum(each, 1, dtype=np.float64)[:, -1]
            progress.advance(int(lengths[chosen].sum()))
    return losses.reshape(-1, ENDINGS)


def shapes(model: GPT2, questions: Questions) -> set[tuple[int, int]]:
    """(sequences, T) of the batches in which `evaluate` asks these questions, for GPT2.compile."""
    return {(len(chosen), T) for chosen, T in _batches(model, _lengths(model, questions))}


def _longest(model: GPT2) -> int:
    return min(model.config.model.block_size, model.B * model.T)


def _lengths(model: GPT2, questions: Questions) -> np.ndarray:
    """Inputs of each ending and its context: the last token of all is only a target."""
    longest = _longest(model)
    _refuse_longer(questions, longest)
    whole = [len(questions.contexts[i // ENDINGS]) + len(ending) for i, ending in enumerate(questions.endings)]
    return np.minimum(np.array(whole) - 1, longest)


def _batches(model: GPT2, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    return batches(lengths, model.B * model.T, _longest(model))


def batches(lengths: np.ndarray, budget: int, longest: int) -> Iterator[tuple[np.ndarray, int]]:
    """(sequences, T): every sequence once, the longest first; T is the longest of the batch, rounded up to a multiple
    of 32 but no more than `longest`; T times the sequences is at most `budget`.
    """
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        T = min(-(-int(lengths[order[0]]) // MULTIPLE) * MULTIPLE, longest)
        yield order[: budget // T], T
        order = order[budget // T :]


def _refuse_longer(questions: Questions, longest: int) -> None:
    """An ending is scored whole or not at all."""
    length = max(map(len, questions.endings))
    if length > longest:
        expected = f"{longest} or fewer, which this model can take at once"
        raise bad_data("hellaswag", "an ending too long", f"{length} tokens", expected, "leave this model out")


def choices(questions: Questions, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The endings chosen by the smallest loss and by the smallest loss over the length, int64 [rows] each."""
    with np.errstate(divide="ignore"):  # an ending that the clean-up left empty is infinitely unlikely
        return losses.argmin(1), (losses / questions.lengths).argmin(1)


def scores(questions: Questions, losses: np.ndarray) -> Scores:
    """Accuracies of the summed losses [rows, 4]."""
    rows, values = len(questions.labels), []
    for chosen in choices(questions, losses):
        acc = float((chosen == questions.labels).mean())
        values += [acc, math.sqrt(acc * (1 - acc) / max(rows - 1, 1))]  # the sample's standard deviation / sqrt(rows)
    return Scores(rows, *values)


LABELS = {
    "completion": "the text as it is; norm: loss per token (llm.c, build-nanogpt)",
    "harness": "text cleaned up, with its activity; norm: loss per character (lm-evaluation-harness)",
}


def table(results: dict[str, Scores]) -> str:
    """The scores of each style, a line a style."""
    lines = [f"{'style':<12}{'acc':>8}{'+-':>8}{'acc_norm':>10}{'+-':>8}"]
    for style, s in results.items():
        numbers = f"{s.acc:>8.4f}{s.acc_stderr:>8.4f}{s.acc_norm:>10.4f}{s.acc_norm_stderr:>8.4f}"
        lines.append(f"{style:<12}{numbers}  {LABELS[style]}")
    return "\n".join(lines)


def record(results: dict[str, Scores]) -> dict[str, Any]:
    """The scores for JSON."""
    return {style: scored._asdict() for style, scored in results.items()}
