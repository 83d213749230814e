"""Evaluation tasks: where the rows of each are published, the question that a row becomes, and the metrics.

Texts, endings and metrics are those of lm-evaluation-harness, from a file below its lm_eval/tasks:

    hellaswag   hellaswag/hellaswag.yaml     hellaswag.py has its rules                           acc, acc_norm
    lambada     lambada/lambada_openai.yaml  the text without its last word; that word            perplexity, acc
    arc_easy    arc/arc_easy.yaml            "Question: question\\nAnswer:"; 3 to 5 choices.text  acc, acc_norm
    piqa        piqa/piqa.yaml               "Question: goal\\nAnswer:"; sol1 and sol2            acc, acc_norm
    winogrande  winogrande/default.yaml      the sentence up to "_" with option1 and with         acc
                                             option2; the rest of the sentence after either

acc is the fraction of rows whose right ending has the smallest summed loss, acc_norm that by the loss per character.
LAMBADA's acc is the fraction of last words of which every token is the most likely one, its perplexity the exponential
of the mean loss of a last word.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, model_validator

from gpt2_triton.data import hellaswag
from gpt2_triton.data.hub import hub_errors_as
from gpt2_triton.data.questions import (
    ACC,
    ACC_NORM,
    PERPLEXITY,
    PublishedRow,
    Question,
    Questions,
    encode,
    first_of,
    harness_question,
    parse_row,
    read_jsonl,
)
from gpt2_triton.data.tokenizer import Tokenizer
from gpt2_triton.errors import bad_data

IN_COMMAND = "check the network, or give its rows as --data: a file, for several tasks a folder of TASK.jsonl"
IN_FILE = "correct that file, or leave its task out of --tasks"  # where --data has named it
IN_TRAINING = "set eval.tasks_data to a folder of TASK.jsonl, or leave it out of eval.tasks"


class Hub(NamedTuple):
    """A split of a dataset of the Hugging Face Hub."""

    name: str
    version: str | None
    split: str


class Task(NamedTuple):
    """A task: its name in tables, the rows, the question that a row becomes, the metrics."""

    title: str
    source: Hub | Callable[[str], Path]  # a function returns the downloaded file, and ends its errors with the argument
    row: type[PublishedRow]
    question: Callable[[Any], Question]
    metrics: tuple[str, ...]


class LambadaRow(PublishedRow):
    expected: ClassVar[str] = "an object with text that ends in a word"

    text: Annotated[str, Field(pattern=r"\S[^ ]*$")]


def lambada(row: LambadaRow) -> Question:
    """Return the last word of the text as the only ending."""
    context, _, word = row.text.rpartition(" ")
    return harness_question([context], [word], 0)


class ArcChoices(BaseModel):
    text: Annotated[list[str], Field(min_length=1)]
    label: list[str]


class ArcRow(PublishedRow):
    expected: ClassVar[str] = "an object with question, choices of text and label, and an answerKey among the labels"

    question: str
    choices: ArcChoices
    answerKey: str

    @model_validator(mode="after")
    def _answer_is_a_choice(self) -> "ArcRow":
        text, label = self.choices.text, self.choices.label
        if len(text) != len(label) or self.answerKey not in label:
            raise ValueError(f"{len(text)} texts, labels {label} and answerKey {self.answerKey!r}")
        return self


def arc(row: ArcRow) -> Question:
    """Return the question with its choices as endings."""
    context, choices = f"Question: {row.question}\nAnswer:", row.choices.text
    return harness_question([context] * len(choices), choices, row.choices.label.index(row.answerKey))


class PiqaRow(PublishedRow):
    expected: ClassVar[str] = "an object with goal, sol1, sol2 and a label of 0 or 1"

    goal: str
    sol1: str
    sol2: str
    label: Annotated[int, Field(ge=0, le=1)]


def piqa(row: PiqaRow) -> Question:
    """Return the goal with both solutions as endings."""
    return harness_question([f"Question: {row.goal}\nAnswer:"] * 2, [row.sol1, row.sol2], row.label)


class WinograndeRow(PublishedRow):
    expected: ClassVar[str] = "an object with a sentence that has a _, option1, option2 and an answer of 1 or 2"

    sentence: Annotated[str, Field(pattern="_")]
    option1: str
    option2: str
    answer: Literal["1", "2"]


def winogrande(row: WinograndeRow) -> Question:
    """Return the sentence up to each option as contexts, and the rest of it as the ending of both (partial evaluation:
    Trinh and Le, arXiv:1806.02847).
    """
    before, _, after = row.sentence.partition("_")
    return harness_question([before + row.option1, before + row.option2], [after.strip()] * 2, int(row.answer) - 1)


TASKS = {
    "hellaswag": Task("HellaSwag", hellaswag.downloaded, hellaswag.Row, hellaswag.harness, (ACC, ACC_NORM)),
    "lambada": Task(
        "LAMBADA", Hub("EleutherAI/lambada_openai", "default", "test"), LambadaRow, lambada, (PERPLEXITY, ACC)
    ),
    "arc_easy": Task("ARC-Easy", Hub("allenai/ai2_arc", "ARC-Easy", "test"), ArcRow, arc, (ACC, ACC_NORM)),
    "piqa": Task("PIQA", Hub("baber/piqa", None, "validation"), PiqaRow, piqa, (ACC, ACC_NORM)),
    "winogrande": Task(
        "WinoGrande", Hub("allenai/winogrande", "winogrande_xl", "validation"), WinograndeRow, winogrande, (ACC,)
    ),
}


def load_questions(name: str, path: Path | None, tokenizer: Tokenizer, limit: int, todo: str = IN_COMMAND) -> Questions:
    """Return the first `limit` rows (0: all) of a task, from a .jsonl of rows as published; path None downloads them.

    An error ends with `todo`: IN_COMMAND, IN_FILE or IN_TRAINING.
    """
    task = TASKS[name]
    source = path or task.source
    if isinstance(source, Hub):
        rows = _download(source, task.row, limit, todo)
    else:
        rows = read_jsonl(source if isinstance(source, Path) else source(todo), task.row, limit, todo)
    return encode([*map(task.question, rows)], tokenizer, task.metrics)


def _download(source: Hub, kind: type[PublishedRow], limit: int, todo: str) -> list[PublishedRow]:
    """Return rows of the Hub; `datasets` keeps them in its cache."""
    name, version, split = source
    with hub_errors_as(name, f"the split {split}{f' of {version}' if version else ''}", todo):
        from datasets import load_dataset

        found = list(first_of(load_dataset(name, version, split=split), limit))
    if not found:
        raise bad_data(name, "no rows", f"an empty split {split}", "one or more", todo)
    return [parse_row(kind, row, f"{name}, {split}, row {number}", todo) for number, row in enumerate(found)]
