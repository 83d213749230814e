"""HellaSwag's questions as tokens: a context and four endings; one ending is right.

Two styles are in use, and give different figures.  Both add the losses of an ending's
tokens after the context, and choose the ending with the smallest sum (acc), or with the
smallest sum / length (acc_norm):

    completion  context `ctx`, ending " " + ending, tokenised separately; length is the number of
                tokens.  llm.c, build-nanogpt:
                https://github.com/karpathy/llm.c/blob/master/dev/data/hellaswag.py
    harness     context "activity_label: ctx_a Ctx_b"; WikiHow's brackets are removed from context
                and endings; length is the number of characters.  lm-evaluation-harness,
                lm_eval/tasks/hellaswag/utils.py
"""

import hashlib
import itertools
import os
import re
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from gpt2_triton.data.tokenizer import Tokenizer, encode_prompt, encode_rest
from gpt2_triton.errors import DataError
from gpt2_triton.files import expand, sha256, write_atomic

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "ebb2a9cd1f4e4f353a37e444bd2d3e7f37a548b35dcce49027f6925402c39ae3"
CACHED = Path(".cache/gpt2_triton/hellaswag_val.jsonl")  # in $HOME; a container may have none
ENDINGS = 4
TODO = (
    f"get it with `curl -LO {URL}` for --data FILE; "
    "a run takes eval.hellaswag_data, or eval.hellaswag_every 0"
)


class Example(BaseModel):
    """A line of the .jsonl; other fields are ignored."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    ctx: str
    endings: Annotated[list[str], Field(min_length=ENDINGS, max_length=ENDINGS)]
    label: Annotated[int, Field(ge=0, lt=ENDINGS)]


class Questions(NamedTuple):
    """Rows as tokens: contexts and endings [4 * rows], arrays of at least one token."""

    contexts: list[np.ndarray]
    endings: list[np.ndarray]
    lengths: np.ndarray  # of the endings, for acc_norm: float64 [4 * rows]
    labels: np.ndarray  # the right ending: int64 [rows]


def load_questions(
    path: Path | None, tokenizer: Tokenizer, limit: int, styles: Sequence[str]
) -> dict[str, Questions]:
    """Return the first `limit` rows (0: all) by style; path None downloads the .jsonl."""
    try:
        with open(expand(str(path)) if path else downloaded(), "rb") as file:
            rows = [*map(Example.model_validate_json, itertools.islice(file, limit or None))]
    except ValidationError as error:
        raise DataError(
            f"{path}: not rows of HellaSwag: {error.errors()[0]['msg']}; {TODO}"
        ) from None
    except OSError as error:
        raise DataError(
            f"{error.filename or CACHED}: cannot read or write: {error.strerror}; {TODO}"
        ) from None
    return {style: STYLES[style](rows, tokenizer) for style in styles}


def downloaded() -> Path:
    """Return the cached .jsonl, 12 MB; download it if it is missing.  Any number of
    processes may do so at once.
    """
    target = Path(os.environ.get("HOME") or tempfile.gettempdir(), CACHED)
    if target.is_file() and sha256(target) == SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            data = response.read()
    except (OSError, HTTPException) as error:  # a cut connection raises HTTPException
        raise DataError(
            f"{URL}: cannot download: {getattr(error, 'reason', error)}; try again; else {TODO}"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise DataError(f"{URL}: wrong sha256 {found}, expected {SHA256}; try again; else {TODO}")
    write_atomic(target, data)
    return target


def completion(rows: Sequence[Example], tokenizer: Tokenizer) -> Questions:
    """Return llm.c's questions, with the text unchanged."""
    endings = [encode_rest(tokenizer, " " + ending) for row in rows for ending in row.endings]
    return _questions([row.ctx for row in rows], endings, [*map(len, endings)], rows, tokenizer)


def harness(rows: Sequence[Example], tokenizer: Tokenizer) -> Questions:
    """Return lm-evaluation-harness's questions: spaces at the end of a
    context belong to the ending.

    The harness tokenises context and ending together.  Tokenised alone they give the same tokens:
    the ending begins with a space, and GPT-2 and Llama 3 split a text before this space, then
    merge bytes within the pieces.
    """
    contexts = [
        clean(f"{row.activity_label}: {row.ctx_a} {row.ctx_b.capitalize()}") for row in rows
    ]
    texts = [[clean(ending) for ending in row.endings] for row in rows]
    spaces = [context[len(context.rstrip()) :] + " " for context in contexts]
    endings = [
        encode_rest(tokenizer, space + text)
        for space, of_row in zip(spaces, texts)
        for text in of_row
    ]
    lengths = [len(text) for of_row in texts for text in of_row]
    return _questions([context.rstrip() for context in contexts], endings, lengths, rows, tokenizer)


def _questions(
    contexts: list[str],
    endings: list[np.ndarray],
    lengths: list[int],
    rows: Sequence[Example],
    tokenizer: Tokenizer,
) -> Questions:
    prompts = [encode_prompt(tokenizer, text) for text in contexts]
    repeated = [prompt for prompt in prompts for _ in range(ENDINGS)]
    labels = np.array([row.label for row in rows])
    return Questions(repeated, endings, np.array(lengths, np.float64), labels)


def clean(text: str) -> str:
    """Remove WikiHow's mark-up as lm-evaluation-harness does."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


STYLES: dict[str, Callable[[Sequence[Example], Tokenizer], Questions]] = {
    "completion": completion,
    "harness": harness,
}
