"""HellaSwag: the loss of every ending of every question, and the accuracies that follow.

The losses of a sequence depend neither on the rest of its batch nor on padding after it: attention
is causal and every sum has a fixed order.  So batches are made for speed alone.  The longest
sequences come first, and a batch holds as many as fit the arena, padded to its longest.  That
length is rounded up to 32 tokens, so that all batches run through the same kernels (see matmul.py).
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from gpt2_triton.config.config import Config
from gpt2_triton.console import Progress
from gpt2_triton.data.hellaswag import ENDINGS, Questions, load_questions
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import DataError
from gpt2_triton.inference.losses import Stopped
from gpt2_triton.model.forward import padded_length
from gpt2_triton.model.model import Model

Scores = dict[str, float]  # rows, and acc and acc_norm with the standard error of each


def questions_of_run(config: Config) -> Questions | None:
    """Return the questions of a run, in llm.c's style; None if eval.hellaswag_every is 0."""
    e = config.eval
    if not e.hellaswag_every:
        return None
    path = Path(e.hellaswag_data) if e.hellaswag_data else None
    tokenizer = get_tokenizer(config.data.tokenizer)
    return load_questions(path, tokenizer, e.hellaswag_limit, ("completion",))["completion"]


def evaluate(
    model: Model,
    questions: Questions,
    control: ControlGroup = SINGLE_PROCESS,
    stop: Callable[[], bool] = lambda: False,
) -> Scores:
    """Return the scores of `model` on `questions`, divided among the ranks of `control`.

    If `stop` is True on one rank, all raise Stopped.
    """
    part = ending_losses(model, questions, control, stop)
    answered = np.flatnonzero(part)  # other ranks' endings are 0
    losses = np.zeros_like(part)
    here = [answered.tolist(), part[answered].tolist(), stop()]
    for places, values, stopped in control.all_gather(here):
        if stopped:
            raise Stopped
        losses[places] = values
    return scores(questions, losses)


def ending_losses(
    model: Model,
    questions: Questions,
    control: ControlGroup = SINGLE_PROCESS,
    stop: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """Return the summed loss of each ending's tokens given its context, float64 [4 * rows].

    A context that is too long for the model loses its beginning, as in
    lm-evaluation-harness.  A rank computes the batches rank, rank + ranks, ..., until
    `stop` is True; the other endings keep 0.
    """
    lengths = _lengths(model, questions)
    losses = np.zeros(len(lengths), np.float64)
    every = [*batches(lengths, model.B * model.T, _longest(model))]
    mine = every[control.rank :: control.size]
    total = sum(int(lengths[chosen].sum()) for chosen, _ in mine)
    with Progress("HellaSwag", total, "tokens") as progress:
        for chosen, T in mine:
            stopped = stop()
            if stopped:
                break
            ids, targets = _batch(questions, lengths, chosen, T)
            each = model.evaluate(ids, targets).numpy().reshape(ids.shape)
            # np.sum pairs numbers by position: padding would change the
            # last bit; cumsum adds in order
            losses[chosen] = np.cumsum(each, 1, dtype=np.float64)[:, -1]
            progress.advance(int(lengths[chosen].sum()))
    return losses


def _batch(
    questions: Questions, lengths: np.ndarray, chosen: np.ndarray, T: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, targets) of the endings `chosen`, int32 [chosen, T]; -1 is no target."""
    ids = np.zeros((len(chosen), T), np.int32)
    targets = np.full((len(chosen), T), -1, np.int32)
    for row, i in enumerate(chosen.tolist()):
        n = lengths[i]
        ending = questions.endings[i]
        ids[row, :n] = np.concatenate([questions.contexts[i], ending])[-n - 1 : -1]
        targets[row, n - len(ending) : n] = ending
    return ids, targets


def shapes(model: Model, questions: Questions) -> set[tuple[int, int]]:
    """Return (sequences, T) of the batches that `evaluate` makes of these
    questions, for compile_run.
    """
    lengths = _lengths(model, questions)
    return {(len(chosen), T) for chosen, T in batches(lengths, model.B * model.T, _longest(model))}


def require_fitting(model: Model, questions: Questions) -> None:
    """Raise DataError if an ending is longer than the model's longest input."""
    length = max(map(len, questions.endings))
    longest = _longest(model)
    if length > longest:
        raise DataError(
            f"HellaSwag: its longest ending has {length} tokens, and this model sees {longest} at "
            f"once; it needs a model.block_size of {length} or more"
        )


def _longest(model: Model) -> int:
    return min(model.config.model.block_size, model.B * model.T)


def _lengths(model: Model, questions: Questions) -> np.ndarray:
    """Return how many inputs each ending has with its context; its last token is only a target."""
    pairs = zip(questions.contexts, questions.endings, strict=True)
    lengths = [len(context) + len(ending) - 1 for context, ending in pairs]
    return np.minimum(lengths, _longest(model))


def batches(lengths: np.ndarray, budget: int, longest: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield batches as (indices of sequences, T), every sequence once, the longest first.

    T is the longest of the batch rounded up to a multiple of 32, at most `longest`;
    sequences * T is at most `budget`.
    """
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        T = padded_length(int(lengths[order[0]]), longest)
        count = budget // T
        yield order[:count], T
        order = order[count:]


def predictions(questions: Questions, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's ending of smallest loss, and of smallest loss /
    length, int64 [rows] each.
    """
    with np.errstate(divide="ignore"):  # an ending that is empty after the clean-up is never chosen
        normalised = losses / questions.lengths
    return losses.reshape(-1, ENDINGS).argmin(1), normalised.reshape(-1, ENDINGS).argmin(1)


def scores(questions: Questions, losses: np.ndarray) -> Scores:
    """Return acc and acc_norm, fractions of the rows, from the loss of each ending."""
    rows = len(questions.labels)
    found: Scores = {"rows": rows}
    for metric, chosen in zip(("acc", "acc_norm"), predictions(questions, losses), strict=True):
        found[metric] = acc = float((chosen == questions.labels).mean())
        # sample deviation / sqrt(rows)
        found[f"{metric}_stderr"] = math.sqrt(acc * (1 - acc) / max(rows - 1, 1))
    return found


LABELS = {
    "completion": "the text as it is; acc_norm by loss per token (llm.c, build-nanogpt)",
    "harness": (
        "text cleaned up, with its activity; acc_norm by loss per character (lm-evaluation-harness)"
    ),
}


def format_table(results: dict[str, Scores]) -> str:
    """Return a table with one line for each style, and one for guesses."""
    lines = [f"{'style':<12}{'acc':>8}{'+-':>8}{'acc_norm':>10}{'+-':>8}"]
    for style, s in results.items():
        numbers = (
            f"{s['acc']:>8.4f}{s['acc_stderr']:>8.4f}"
            f"{s['acc_norm']:>10.4f}{s['acc_norm_stderr']:>8.4f}"
        )
        lines.append(f"{style:<12}{numbers}  {LABELS[style]}")
    chance = 1 / ENDINGS
    return "\n".join([*lines, f"{'guessing':<12}{chance:>8.4f}{'':>8}{chance:>10.4f}"])
