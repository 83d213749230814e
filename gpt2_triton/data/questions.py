"""Questions of evaluation tasks: contexts with endings, of which one is right, as text and as tokens."""

import codecs
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from gpt2_triton.data.tokenizer import Tokenizer
from gpt2_triton.errors import bad_data

ACC, ACC_NORM, PERPLEXITY = "acc", "acc_norm", "perplexity"


class PublishedRow(BaseModel):
    """The fields of a published row that are used."""

    expected: ClassVar[str]  # the row in words, for error messages


RowType = TypeVar("RowType", bound=PublishedRow)
Item = TypeVar("Item")


class Question(NamedTuple):
    """A row as text: the endings, the context of each, their lengths for acc_norm, and which ending is right."""

    contexts: Sequence[str]
    endings: Sequence[str]
    lengths: Sequence[int] | None  # None: the number of tokens
    label: int


class Questions(NamedTuple):
    """Rows as tokens.  Contexts and endings [endings of all rows] are uint16 arrays of at least one token.

    metrics: "acc_norm" divides losses by lengths; with "perplexity", "acc" is whether each token of the only ending is
    the most likely one
    """

    contexts: list[np.ndarray]
    endings: list[np.ndarray]
    lengths: np.ndarray  # float64 [endings]
    counts: np.ndarray  # endings of each row: int64 [rows]
    labels: np.ndarray  # the right ending: int64 [rows]
    metrics: tuple[str, ...] = (ACC, ACC_NORM)


def harness_question(contexts: Sequence[str], choices: Sequence[str], label: int) -> Question:
    """Return a question by the rules of lm-evaluation-harness: a space comes before each choice, whose length is its
    characters; spaces at the end of a context belong to the ending.

    The harness tokenises context and ending together and takes the tokens after those of the context.  These are the
    tokens of the ending alone, since the context does not end in a space and the ending begins with one: GPT-2 splits
    text there before it merges bytes.
    """
    stripped = [context.rstrip() for context in contexts]
    spaces = [context[len(rest) :] for context, rest in zip(contexts, stripped, strict=True)]
    endings = [f"{space} {choice}" for space, choice in zip(spaces, choices, strict=True)]
    return Question(stripped, endings, [*map(len, choices)], label)


def encode(
    questions: Sequence[Question], tokenizer: Tokenizer, metrics: tuple[str, ...] = (ACC, ACC_NORM)
) -> Questions:
    """Return the tokens of questions; an empty context becomes the end-of-text token.

    One text at a time takes 0.9 s for all of HellaSwag.  tiktoken's encode_ordinary_batch makes a future for each of
    these short texts and takes 2 to 3 s with any number of threads.
    """
    known = {"": np.array([tokenizer.eot], np.uint16)}
    contexts: list[np.ndarray] = []
    endings: list[np.ndarray] = []
    lengths: list[int] = []
    for question in questions:
        for context in question.contexts:
            if context not in known:
                known[context] = tokenizer.encode(context)
            contexts.append(known[context])
        tokens = [tokenizer.encode(ending) for ending in question.endings]
        endings += tokens
        lengths += [*map(len, tokens)] if question.lengths is None else question.lengths
    counts, labels = ([*values] for values in zip(*((len(q.endings), q.label) for q in questions), strict=True))
    return Questions(contexts, endings, np.array(lengths, np.float64), np.array(counts), np.array(labels), metrics)


def read_jsonl(path: Path, kind: type[RowType], limit: int, todo: str) -> list[RowType]:
    """Return the first `limit` rows (0: all) of a file with one JSON object per line; empty lines do not count."""
    with reading(path, todo), open(path, "rb") as file:
        lines = ((number, line.removeprefix(codecs.BOM_UTF8)) for number, line in enumerate(file, 1))
        rows = [
            parse_row(kind, line, f"{path}:{number}", todo)
            for number, line in first_of(((n, line) for n, line in lines if line.strip()), limit)
        ]
    if not rows:
        raise bad_data(path, "no rows", "an empty file", "one JSON object per line", todo)
    return rows


def first_of(items: Iterable[Item], limit: int) -> Iterator[Item]:
    """Return an iterator over the first `limit` items (0: all), which may be more than islice counts to."""
    return islice(items, min(limit, sys.maxsize) or None)


@contextmanager
def reading(path: Path, todo: str) -> Iterator[None]:
    """Raise DataError about the file of rows if it is not a file, and for an OSError of the block."""
    try:
        if path.exists() and not path.is_file():  # to read a pipe would wait for its writer
            got = "a directory" if path.is_dir() else "something else"
            raise bad_data(path, "not a regular file", got, "a file of rows", todo)
        yield
    except OSError as error:
        raise bad_data(path, "cannot be used", error.strerror, "a file of rows", todo) from None


def parse_row(kind: type[RowType], row: Any, where: str, todo: str) -> RowType:
    """Return a row, given as a dictionary or a line of JSON; DataError at `where` if it has another form."""
    try:
        return kind.model_validate_json(row) if isinstance(row, bytes) else kind.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what, value = ".".join(map(str, first["loc"])), first["input"]
        if isinstance(row, bytes) and not what:
            got = _cut(row.decode(errors="replace").strip(), 60)
        elif first["type"] == "missing":
            got = _cut(f"the fields {', '.join(value)}", 200) if value else "no field"
        else:
            got = _cut(repr(value), 200)
        problem = f"{what or 'not a row'}: {first['msg'].removeprefix('Value error, ')}"
        raise bad_data(where, problem, got, kind.expected, todo) from None


def _cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with its spaces, since those may be what is wrong."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."
