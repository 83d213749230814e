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
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from gpt2_triton.data.questions import PublishedRow, Question, Questions, encode, harness_question, read_jsonl, reading
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


class Row(PublishedRow):
    """The fields of a line of the .jsonl that are used."""

    expected: ClassVar[str] = "an object with activity_label, ctx_a, ctx_b, ctx, 4 endings and a label from 0 to 3"

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
    where = path or downloaded(todo)
    if where.suffix == ".bin":
        return {"completion": _read_bin(where, tokenizer, limit, todo)}
    rows = read_jsonl(where, Row, limit, todo)
    return {style: encode([*map(TEXTS[style], rows)], tokenizer) for style in styles}


def downloaded(todo: str = IN_COMMAND) -> Path:
    """Return the .jsonl in the cache, where it is downloaded to if it is not there."""
    with reading(where := Path.home() / CACHED, todo):
        _download(where, todo)
    return where


def _download(target: Path, todo: str = IN_COMMAND) -> None:
    """Download the .jsonl, 12 MB, unless it is at `target`; it appears there whole or not at all.

    Any number of processes may do so at once: each writes a hidden file and renames it.
    """
    if target.is_file() and sha256(target) == SHA256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    todo = f"try again; else {todo}"
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


def completion(row: Row) -> Question:
    """Return llm.c's question, with the text unchanged."""
    return Question([row.ctx] * ENDINGS, [" " + ending for ending in row.endings], None, row.label)


def harness(row: Row) -> Question:
    """Return lm-evaluation-harness's question."""
    context = clean(f"{row.activity_label}: {row.ctx_a} {row.ctx_b.capitalize()}")
    return harness_question([context] * ENDINGS, [*map(clean, row.endings)], row.label)


def clean(text: str) -> str:
    """Remove WikiHow's mark-up as lm-evaluation-harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


TEXTS: dict[str, Callable[[Row], Question]] = {"completion": completion, "harness": harness}


# ---- llm.c's tokens ----


def _read_bin(path: Path, tokenizer: Tokenizer, limit: int, todo: str) -> Questions:
    """Read llm.c's evaluation file: a header of 256 int32 (magic, version, rows), then the rows, of uint16."""
    with reading(path, todo):
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
        contexts += parts[:1] * ENDINGS
        endings += parts[1:]
        labels.append(int(row[3]))
        at += len(row)
    if not labels:
        raise bad_data(path, "no rows", f"a count of {header[2]} in the header", "1 or more", todo)
    lengths, counts = np.array([*map(len, endings)], np.float64), np.full(len(labels), ENDINGS)
    return Questions(contexts, endings, lengths, counts, np.array(labels))


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
