"""Evaluation tasks: the loss of every ending of every question, and the metrics of its task.

The losses of a sequence depend neither on the rest of its batch nor on padding after it: attention is causal and every
sum has a fixed order.  So batches are made for speed alone, the longest sequences first.  Each batch is padded to its
longest sequence, rounded up to 32 tokens so that all batches run through the same kernels (see matmul.py), and holds as
many sequences as fit the arena.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import VOCAB_MULTIPLE
from gpt2_triton.console import Progress
from gpt2_triton.data import hellaswag, tasks
from gpt2_triton.data.questions import ACC, ACC_NORM, PERPLEXITY, Questions
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.distributed.control import SINGLE_PROCESS, ControlGroup
from gpt2_triton.errors import bad_data
from gpt2_triton.model import schedule
from gpt2_triton.model.gpt2 import GPT2

MULTIPLE = 32

Scores = dict[str, float]  # "rows", then each metric and, of a fraction, its standard error


class Answers(NamedTuple):
    """The summed loss of each ending, float64 [endings of all rows], and whether each of its tokens is the most likely
    one, bool [endings]: False where the task does not use it.
    """

    losses: np.ndarray
    greedy: np.ndarray


def hellaswag_of_run(config: Config) -> Questions | None:
    """Return HellaSwag's questions of a run, in llm.c's style; None if eval.hellaswag_every is 0."""
    e = config.eval
    if not e.hellaswag_every:
        return None
    path = Path(e.hellaswag_data) if e.hellaswag_data else None
    tokenizer, style = get_tokenizer(config.data.tokenizer), "completion"
    return hellaswag.load_questions(path, tokenizer, e.hellaswag_limit, (style,), hellaswag.IN_TRAINING)[style]


def tasks_of_run(config: Config) -> dict[str, Questions]:
    """Return the questions of eval.tasks by task; empty if eval.tasks_every is 0."""
    e = config.eval
    paths = {name: Path(e.tasks_data) / f"{name}.jsonl" if e.tasks_data else None for name in e.task_names}
    return {
        name: tasks.load_questions(name, path, get_tokenizer(config.data.tokenizer), e.tasks_limit, tasks.IN_TRAINING)
        for name, path in paths.items()
    }


def evaluate(model: GPT2, name: str, questions: Questions, control: ControlGroup = SINGLE_PROCESS) -> Scores:
    """Return the scores of `model` on `questions`, divided among the ranks of `control`."""
    own = answer(model, name, questions, shard=(control.rank, control.size))
    # gather these alone: the messages are as long for any number of ranks
    answered = np.flatnonzero((own.losses != 0) | own.greedy)
    parts = [answered.tolist(), own.losses[answered].tolist(), own.greedy[answered].tolist()]
    losses, greedy = np.zeros_like(own.losses), np.zeros_like(own.greedy)
    for places, values, matches in control.all_gather(parts):
        losses[places], greedy[places] = values, matches
    return scores(questions, Answers(losses, greedy))


def answer(model: GPT2, name: str, questions: Questions, shard: tuple[int, int] = (0, 1)) -> Answers:
    """Return the loss of each ending's tokens given its context; `name` is shown with the progress.

    A context that is too long for the model or its arena loses its beginning, as in lm-evaluation-harness.  `shard` is
    (rank, size): compute every size-th batch from rank, and leave 0 for the others.
    """
    lengths = _lengths(model, questions)
    losses, greedy = np.zeros(len(lengths), np.float64), np.zeros(len(lengths), bool)
    own = list(itertools.islice(_batches(model, lengths), shard[0], None, shard[1]))
    total = sum(int(lengths[chosen].sum()) for chosen, _ in own)
    with Progress(name, total, "tokens") as progress:
        for chosen, T in own:
            ids, targets = _batch(questions, lengths, chosen, T)
            each = model.evaluate(ids, targets).numpy().reshape(ids.shape)
            # numpy's sum pairs numbers by position, so that padding would change the last bit; cumsum adds in order
            losses[chosen] = np.cumsum(each, 1, dtype=np.float64)[:, -1]
            if PERPLEXITY in questions.metrics:
                greedy[chosen] = greedy_matches(model, ids, targets).reshape(ids.shape).all(1)
            progress.advance(int(lengths[chosen].sum()))
    return Answers(losses, greedy)


def _batch(questions: Questions, lengths: np.ndarray, chosen: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, targets), int32 [chosen, T], of the endings `chosen`; a target is a token of the ending, or -1."""
    ids, targets = np.zeros((len(chosen), T), np.int32), np.full((len(chosen), T), -1, np.int32)
    for row, i in enumerate(chosen.tolist()):
        n, ending = lengths[i], questions.endings[i]
        ids[row, :n] = np.concatenate([questions.contexts[i], ending])[-n - 1 : -1]
        targets[row, n - len(ending) : n] = ending
    return ids, targets


def greedy_matches(model: GPT2, ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return whether each target has the largest logit, bool [B*T]; True where it is -1; ids, targets int32 [B, T].

    A token's logits are written to the arena's scratch, as many at once as fit.
    """
    v, flat = model.view(*ids.shape), targets.reshape(-1)
    v.ids.copy_(torch.from_numpy(ids))
    for part in (schedule.embed, schedule.block, schedule.final_norm):
        part(model.K, v)
    logits, matches = np.empty(len(v.w.wte), np.float32), flat == -1
    width = min(v.a.scratch.numel() // VOCAB_MULTIPLE * VOCAB_MULTIPLE, len(logits))
    for r in np.flatnonzero(~matches).tolist():
        for first in range(0, len(logits), width):
            rows = v.w.wte[first : first + width]
            chunk = v.a.scratch[: len(rows)].view(1, -1)
            model.K.decode_matmul(chunk, v.a.lnf[r : r + 1], rows, None, None, None, None)
            logits[first : first + width] = chunk[0].cpu().numpy()
        matches[r] = logits[: v.V].argmax() == flat[r]
    return matches


def compile_kernels(model: GPT2, questions: Questions) -> None:
    """Compile what `evaluate` launches for these questions and GPT2.compile does not."""
    if PERPLEXITY in questions.metrics:
        B, T = next(iter(shapes(model, questions)))
        targets = np.full((B, T), -1, np.int32)
        targets[0, 0] = 0
        with model.K.compiling():
            greedy_matches(model, np.zeros_like(targets), targets)


def shapes(model: GPT2, questions: Questions) -> set[tuple[int, int]]:
    """Return (sequences, T) of the batches that `evaluate` makes of these questions, for GPT2.compile."""
    return {(len(chosen), T) for chosen, T in _batches(model, _lengths(model, questions))}


def _longest(model: GPT2) -> int:
    return min(model.config.model.block_size, model.B * model.T)


def require_fitting(model: GPT2, asked: Mapping[str, Questions]) -> None:
    """Raise DataError for an ending that the model cannot take as a whole; `asked` has the questions of each task."""
    longest = _longest(model)
    for name, questions in asked.items():
        lengths = [len(ending) for ending in questions.endings]
        if (length := max(lengths)) > longest:
            row = int(np.searchsorted(np.cumsum(questions.counts), lengths.index(length), side="right")) + 1
            what, expected = "an ending too long", f"{longest} or fewer, the longest input of this model"
            todo = "leave this task or this model out, or ask fewer questions"
            raise bad_data(name, what, f"{length} tokens in row {row:,}", expected, todo)


def _lengths(model: GPT2, questions: Questions) -> np.ndarray:
    """Return the number of inputs of each ending with its context, whose last token is only a target."""
    longest = _longest(model)
    pairs = zip(questions.contexts, questions.endings, strict=True)
    return np.minimum(np.array([len(context) + len(ending) for context, ending in pairs]) - 1, longest)


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


def predictions(questions: Questions, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's ending with the smallest loss and with the smallest loss over the length, int64 [rows] each."""
    with np.errstate(divide="ignore"):  # an ending that is empty after the clean-up is never chosen
        normalised = losses / questions.lengths
    ends = np.cumsum(questions.counts)[:-1]
    plain, norm = (np.array([part.argmin() for part in np.split(values, ends)]) for values in (losses, normalised))
    return plain, norm


def scores(questions: Questions, answers: Answers) -> Scores:
    """Return the metrics of the task; acc and acc_norm are fractions of the rows."""
    rows = len(questions.labels)
    found: Scores = {"rows": rows}
    if PERPLEXITY in questions.metrics:
        with np.errstate(over="ignore"):
            found[PERPLEXITY] = float(np.exp(answers.losses.mean()))
        right = {ACC: answers.greedy}
    else:
        plain, norm = predictions(questions, answers.losses)
        right = {ACC: plain == questions.labels, ACC_NORM: norm == questions.labels}
    for metric in [metric for metric in questions.metrics if metric in right]:
        found[metric] = acc = float(right[metric].mean())
        # the sample's standard deviation / sqrt(rows)
        found[f"{metric}_stderr"] = math.sqrt(acc * (1 - acc) / max(rows - 1, 1))
    return found


LABELS = {
    "completion": "the text as it is; norm: loss per token (llm.c, build-nanogpt)",
    "harness": "text cleaned up, with its activity; norm: loss per character (lm-evaluation-harness)",
}


def format_table(results: dict[str, Scores]) -> str:
    """Return a table with one line for each task."""
    lines = [f"{'task':<12}{'rows':>7}{'acc':>8}{'+-':>8}{'acc_norm':>10}{'+-':>8}{'perplexity':>12}"]
    cells = ((ACC, 8, 4), ("acc_stderr", 8, 4), (ACC_NORM, 10, 4), ("acc_norm_stderr", 8, 4), (PERPLEXITY, 12, 2))
    for name, s in results.items():
        numbers = "".join(f"{s[key]:>{width}.{digits}f}" if key in s else " " * width for key, width, digits in cells)
        lines.append(f"{name:<12}{s['rows']:>7,}{numbers}".rstrip())
    return "\n".join(lines)


def format_styles(results: dict[str, Scores]) -> str:
    """Return a table with one line for each style of HellaSwag."""
    lines = [f"{'style':<12}{'acc':>8}{'+-':>8}{'acc_norm':>10}{'+-':>8}"]
    for style, s in results.items():
        numbers = f"{s[ACC]:>8.4f}{s['acc_stderr']:>8.4f}{s[ACC_NORM]:>10.4f}{s['acc_norm_stderr']:>8.4f}"
        lines.append(f"{style:<12}{numbers}  {LABELS[style]}")
    return "\n".join(lines)
