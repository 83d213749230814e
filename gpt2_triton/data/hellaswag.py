"""HellaSwag's questions as tokens: a context, and four endings of which one is right.

Two styles are in use, which give different figures.  Both score each ending by the sum of its tokens' losses given the
context (acc) and by that sum divided by the ending's length (acc_norm):

    completion  context `ctx`, ending " " + ending, tokenised separately; length is the number of tokens.  llm.c,
                build-nanogpt: https://github.com/karpathy/llm.c/blob/master/dev/data/hellaswag.py
    harness     context "activity_label: ctx_a Ctx_b"; WikiHow's brackets are removed from context and endings; length
                is the number of characters.  lm-evaluation-harness, lm_eval/tasks/hellaswag/utils.py

The rows come from the published .jsonl, or from llm.c's .bin, which holds tokens of the completion style only.
"""

import hashlib
import re
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from gpt2_triton.data.tokenizer import Tokenizer
from gpt2_triton.errors import bad_data
from gpt2_triton.files import sha256, write_atomic

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "ebb2a9cd1f4e4f353a37e444bd2d3e7f37a548b35dcce49027f6925402c39ae3"
CACHED = Path(".cache/gpt2_triton/hellaswag_val.jsonl")  # in the user's home
BIN_MAGIC, BIN_VERSION, BIN_HEADER_BYTES, BIN_START = 20240522, 1, 1024, 65535
ENDINGS = 4
GET = f"get it with `curl -LO {URL}`"
IN_COMMAND = f"{GET} and give it as --data FILE"
IN_TRAINING = f"{GET} and set eval.hellaswag_data to it, or eval.hellaswag_every to 0"


class Questions(NamedTuple):
    """Rows as tokens.  contexts [rows] and endings [rows * 4] are uint16 arrays of at least one token."""

    contexts: list[np.ndarray]
    endings: list[np.ndarray]
    lengths: np.ndarray  # of the endings, for acc_norm: float64 [rows, 4]
    labels: np.ndarray  # the right ending: int64 [rows]


class Row(BaseModel):
    """The fields of a line of the .jsonl that are used."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    ctx: str
    endings: Annotated[list[str], Field(min_length=ENDINGS, max_length=ENDINGS)]
    label: Annotated[int, Field(ge=0, lt=ENDINGS)]


def load_questions(
    path: Path | None, tokenizer: Tokenizer, limit: int, styles: Sequence[str], todo: str = IN_COMMAND
) -> dict[str, Questions]:
    """Return the first `limit` rows (0: all) in each of `styles` that the file has; path None downloads the .jsonl.

    An error ends with `todo`, IN_COMMAND or IN_TRAINING.
    """
    where = path or Path.home() / CACHED
    try:
        if path is None:
            _download(where, todo)
        if where.exists() and not where.is_file():  # to read a pipe would wait for its writer
            raise bad_data(where, "not a regular file", "something else", "HellaSwag's rows", todo)
        if where.suffix == ".bin":
            return {"completion": _read_bin(where, tokenizer, limit, todo)}
        rows = _read_jsonl(where, limit, todo)
    except OSError as error:
        raise bad_data(where, "cannot be used", error.strerror, "HellaSwag's rows", todo) from None
    return {style: TEXTS[style](rows, tokenizer) for style in styles}


def _download(target: Path, todo: str = IN_COMMAND) -> None:
    """Download the .jsonl, 12 MB, unless it is at `target`; it appears there whole or not at all.

    Any number of processes may do so at once: each writes a hidden file and renames it.
    """
    if target.is_file() and sha256(target) == SHA256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    todo = f"try again, or on another machine {todo}"
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            data = response.read()
    except (OSError, HTTPException) as error:  # URLError and a timeout are OSErrors, a cut connection is the other
        got = getattr(error, "reason", None) or error
        raise bad_data(URL, "cannot download", got, "the file", todo) from error
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise bad_data(URL, "wrong sha256", found, SHA256, todo)
    write_atomic(target, data)


# ---- text ----


def _read_jsonl(path: Path, limit: int, todo: str) -> list[Row]:
    with open(path, "rb") as file:
        rows = [_parse(line, f"{path}:{number}", todo) for number, line in enumerate(islice(file, limit or None), 1)]
    if not rows:
        raise bad_data(path, "no rows", "an empty file", "one JSON object per line", todo)
    return rows


def _parse(line: bytes, where: str, todo: str) -> Row:
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = ".".join(map(str, first["loc"])) or "not a row"
        message = first["msg"]
        got = first["input"] if what in ("label", "endings") else type(first["input"]).__name__
        expected = "an object with activity_label, ctx_a, ctx_b, ctx, 4 endings and a label from 0 to 3"
        raise bad_data(where, f"{what}: {message}", repr(got), expected, todo) from None


def completion(rows: Sequence[Row], tokenizer: Tokenizer) -> Questions:
    """Return llm.c's questions, with the text unchanged."""
    endings = [" " + ending for row in rows for ending in row.endings]
    contexts, tokens = _encode(tokenizer, [row.ctx for row in rows], endings)
    return Questions(contexts, tokens, _matrix(map(len, tokens)), _labels(rows))


def harness(rows: Sequence[Row], tokenizer: Tokenizer) -> Questions:
    """Return lm-evaluation-harness's questions.

    The harness tokenises context and ending together and takes the tokens after those of the context.  These are the
    tokens of the ending alone, since the context does not end in a space and the ending begins with one: GPT-2 splits
    text there before it merges bytes.
    """
    queries = [clean(f"{row.activity_label}: {row.ctx_a} {row.ctx_b.capitalize()}") for row in rows]
    cleaned = [clean(ending) for row in rows for ending in row.endings]
    spaces = [query[len(query.rstrip()) :] for query in queries for _ in range(ENDINGS)]  # belong to the ending
    endings = [f"{space} {ending}" for space, ending in zip(spaces, cleaned, strict=True)]
    contexts, tokens = _encode(tokenizer, [query.rstrip() for query in queries], endings)
    return Questions(contexts, tokens, _matrix(map(len, cleaned)), _labels(rows))


def clean(text: str) -> str:
    """Remove WikiHow's mark-up as lm-evaluation-harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


TEXTS: dict[str, Callable[[Sequence[Row], Tokenizer], Questions]] = {"completion": completion, "harness": harness}


def _encode(tokenizer: Tokenizer, contexts: list[str], endings: list[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the tokens of both; an empty context becomes the end-of-text token.

    One text at a time takes 0.9 s for all of HellaSwag.  tiktoken's encode_ordinary_batch makes a future for each of
    these short texts and takes 2 to 3 s with any number of threads.
    """
    start = np.array([tokenizer.eot], np.uint16)
    return [tokenizer.encode(text) if text else start for text in contexts], [tokenizer.encode(e) for e in endings]


def _matrix(lengths: map) -> np.ndarray:
    return np.array(list(lengths), np.float64).reshape(-1, ENDINGS)


def _labels(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row.label for row in rows], np.int64)


# ---- llm.c's tokens ----


def _read_bin(path: Path, tokenizer: Tokenizer, limit: int, todo: str) -> Questions:
    """Read llm.c's evaluation file: a header of 256 int32 (magic, version, rows), then the rows, of uint16."""
    raw = path.read_bytes().ljust(BIN_HEADER_BYTES, b"\0")
    header = np.frombuffer(raw[:BIN_HEADER_BYTES], "<i4")
    stream = np.frombuffer(raw[BIN_HEADER_BYTES : len(raw) // 2 * 2], "<u2")
    if header[:2].tolist() != [BIN_MAGIC, BIN_VERSION]:
        expected = f"{[BIN_MAGIC, BIN_VERSION]} (llm.c's evaluation file)"
        raise bad_data(path, "wrong magic number and version", header[:2].tolist(), expected, todo)
    contexts, endings, labels, at = [], [], [], 0
    for number in range(min(int(header[2]), limit or int(header[2]))):
        row = stream[at : at + int(stream[at + 1]) // 2] if at + 1 < len(stream) else stream[:0]
        parts = _bin_parts(row)
        if parts is None or max(part.max() for part in parts) >= tokenizer.vocab_size:
            where, got = f"{path}: row {number} (byte {BIN_HEADER_BYTES + 2 * at:,})", f"{row[:6].tolist()}..."
            expected = f"65535, bytes, row, label, 4, then a context and 4 endings of {tokenizer.name} tokens"
            raise bad_data(where, "damaged", got, expected, todo)
        contexts.append(parts[0])
        endings += parts[1:]
        labels.append(int(row[3]))
        at += len(row)
    if not labels:
        raise bad_data(path, "no rows", f"a count of {header[2]} in the header", "1 or more", todo)
    return Questions(contexts, endings, _matrix(map(len, endings)), np.array(labels, np.int64))


def _bin_parts(row: np.ndarray) -> list[np.ndarray] | None:
    """Return the tokens of the context and of the endings; None if the row is damaged.

    A row holds 65535, its bytes, its number, the label, 4, and five times a count and as many tokens.
    """
    if len(row) < 6 or row[0] != BIN_START or row[3] >= ENDINGS or row[4] != ENDINGS:
        return None
    parts, at = [], 5
    while at < len(row):
        parts.append(row[at + 1 : at + 1 + int(row[at])])
        at += 1 + int(row[at])
    return parts if at == len(row) and len(parts) == 1 + ENDINGS and all(map(len, parts)) else None
