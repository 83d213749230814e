"""A dataset of the Hugging Face Hub, or a folder, as shards: val_000000.bin, train_000001.bin, train_000002.bin, ...

Documents are streamed in their order, each after an end-of-text token, and the first shard is validation: the layout
of llm.c's fineweb.py.  A row holds text, or a list of the tokenizer's tokens, as nvidia/ClimbMix does.
"""

import hashlib
import itertools
import re
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2_triton.console import print_line
from gpt2_triton.data.hub import hub_errors_as, repository
from gpt2_triton.data.prepare import pipeline, shard_writer
from gpt2_triton.data.prepare.pipeline import PROGRESS, Batch
from gpt2_triton.data.prepare.shard_writer import SHARD_TOKENS, Log, Pieces, ShardRecords
from gpt2_triton.data.shards import RECORD, read_record
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import bad_data

AGAIN = "run the same command again: it resumes after the last finished shard"
SOURCE = "a folder here, or a dataset of the Hugging Face Hub as owner/name"
FILES = "correct the file that cannot be read, or leave it out; expected parquet, JSON lines or text in UTF-8"
OFFLINE = "check the name in --source and the network, or give a folder of its files, or use `prepare text`"


class Dataset(NamedTuple):
    """A dataset's name on the Hub, or a folder of parquet, jsonl or text files."""

    name: str
    version: str | None = None  # its configuration, as sample-10BT
    revision: str | None = None  # branch or commit; by default the newest commit of main
    field: str = "text"


def prepare_dataset(
    dataset: Dataset,
    out_dir: Path,
    tokenizer: str,
    tokens: int | None = None,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    log: Log = print_line,
    nominal: int | None = None,
    other_field: str = "name the field that holds the text as --field",
    kind: type[str] | type[list[Any]] = str,
) -> Path:
    """Tokenise a dataset, or its first `tokens` tokens, into out_dir.

    nominal       the dataset's number of tokens, where its version does not state it
    other_field   what to do if the field is missing or has another content, for the error
    kind          what a row holds: str, text, or list, the tokenizer's tokens

    The validation shard has shard_tokens tokens like the others, but at most a tenth of `tokens`.
    """
    dataset = dataset._replace(revision=_commit(dataset, out_dir))
    sizes = dict(tokens=tokens, shard_tokens=shard_tokens, val_tokens=min(shard_tokens, (tokens or 1 << 62) // 10))
    recipe: dict[str, Any] = dict(tokenizer=tokenizer, **sizes, source=dataset._asdict())
    if Path(dataset.name).is_dir():
        recipe["folder"] = _files_of(Path(dataset.name), out_dir)
    source, begun = _Documents(dataset, sizes, tokenizer, nominal, other_field, kind), time.monotonic()
    with shard_writer.disk_errors_as(out_dir), pipeline.locked(out_dir, log):
        if shard_writer.is_done(out_dir, recipe):
            log(f"{out_dir} is prepared already")
            (out_dir / PROGRESS).unlink(missing_ok=True)
            return out_dir
        get_tokenizer(tokenizer)  # the workers find it in tiktoken's cache
        preparation = pipeline.Preparation(source, recipe, out_dir, log)
        with shard_writer.workers(workers) as run:
            preparation.write(run, source.size or shard_tokens)
        if len(preparation.shards) < 2:
            preparation.discard()  # it would stand in the way of the command that the message asks for
            got, expected = f"{preparation.tokens:,} tokens", f"more than the {sizes['val_tokens']:,} of validation"
            raise bad_data(dataset.name, "too little text", got, expected, "give that as --tokens, or less")
        preparation.finish()
    shards, took = preparation.shards, timedelta(seconds=round(time.monotonic() - begun))
    log(f"prepared {out_dir}: {len(shards)} shards, {preparation.tokens:,} tokens, in {took}")
    return out_dir


def _files_of(folder: Path, out_dir: Path) -> str:
    """Return the number of files of a folder and its folders but out_dir, and a digest of their names, sizes, times."""
    found = (path for path in folder.rglob("*") if out_dir.resolve() not in path.resolve().parents)
    files = sorted(path for path in found if path.is_file())
    stats = ((path.relative_to(folder), path.stat()) for path in files)
    rows = "".join(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for name, stat in stats)
    return f"{len(files)} files, {hashlib.sha256(rows.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


def _commit(dataset: Dataset, out_dir: Path) -> str | None:
    """Return the commit to read: the recorded one if a preparation is resumed; None for a folder."""
    if Path(dataset.name).is_dir():
        return None
    if re.fullmatch(r"[0-9a-f]{40}", dataset.revision or ""):
        return dataset.revision
    for record in (RECORD, PROGRESS):
        recorded = read_record(out_dir / record).get("source")
        if dataset.revision is None and isinstance(recorded, dict) and recorded.get("name") == dataset.name:
            return recorded.get("revision")
    return repository(dataset.name, dataset.revision, SOURCE, OFFLINE, expand=["sha"]).sha


class _Documents:
    """The documents of a dataset as a Source; a state is that of `datasets`."""

    unit = "tokens"

    def __init__(
        self,
        dataset: Dataset,
        sizes: dict[str, int | None],
        tokenizer: str,
        nominal: int | None,
        other_field: str,
        kind: type[str] | type[list[Any]],
    ):
        self._other_field, self._kind = other_field, kind
        self.name, self._dataset, self._sizes, self._tokenizer = dataset.name, dataset, sizes, tokenizer
        self._todo = FILES if Path(dataset.name).is_dir() else AGAIN
        self.size = sizes["tokens"] or nominal or _nominal_tokens(dataset.version)

    def done(self, state: Any, tokens: int) -> int:
        return tokens

    def plan(self, split: str, shards: ShardRecords) -> Iterator[tuple[str, int]]:
        left = (self._sizes["tokens"] or 1 << 62) - sum(shard["tokens"] for shard in shards.values())
        for number in itertools.count(len(shards)):
            name, size = ("train", "shard_tokens") if number else ("val", "val_tokens")
            count = min(left, self._sizes[size] or 0)
            if not count:
                return
            yield f"{name}_{number:06d}.bin", count
            left -= count

    def batches(self, state: Any) -> Iterator[Batch]:
        """Yield batches of documents with BATCH_CHARS characters or more."""
        rows = self._open(state)
        documents = self._texts(rows)
        state = state or rows.state_dict()
        while batch := _take(documents):
            yield Batch("", state, batch)
            state = rows.state_dict()

    def _open(self, state: Any) -> Any:
        """Return the dataset as an iterable of rows, from `state` on."""
        name, version, revision, field = self._dataset
        expected = f"the dataset{f', configuration {version}' if version else ''}"
        with hub_errors_as(name, expected, OFFLINE):
            from datasets import load_dataset

            rows = load_dataset(name, version, split="train", revision=revision, streaming=True)
            names = rows.column_names or [*next(iter(rows), {field: ""})]
            if field not in names:
                got, todo = f"the fields {', '.join(names)}", self._other_field
                raise bad_data(name, f"no field {field!r}", got, "it", todo)
            rows = rows.select_columns([field])
            if state:
                rows.load_state_dict(state)
            return rows

    def _texts(self, dataset: Any) -> Iterator[str | np.ndarray]:
        rows, field = iter(dataset), self._dataset.field
        while True:
            with hub_errors_as(self.name, "its next document", self._todo):
                row = next(rows, None)
            if row is None:
                return
            if not isinstance(row[field], self._kind):
                what, expected = ("tokens", "a list of tokens") if self._kind is list else ("text", "a string")
                got, todo = type(row[field]).__name__, f"correct or remove such rows, or {self._other_field}"
                raise bad_data(self.name, f"no {what} in field {field!r}", got, expected, todo)
            yield self._checked_tokens(row[field]) if self._kind is list else row[field]

    def _checked_tokens(self, row: list[Any]) -> np.ndarray:
        """Return a row of tokens, uint16; DataError if it has others than the tokenizer's."""
        vocab_size = get_tokenizer(self._tokenizer).vocab_size
        try:
            tokens = np.array(row or [0])
        except ValueError:  # lists of different lengths
            tokens = np.empty((0, 0))
        got = f"{tokens.min()} to {tokens.max()}" if tokens.dtype.kind == "i" else textwrap.shorten(repr(row), 60)
        if tokens.ndim != 1 or tokens.dtype.kind != "i" or tokens.min() < 0 or tokens.max() >= vocab_size:
            what, expected = f"no tokens in field {self._dataset.field!r}", f"integers from 0 to {vocab_size - 1:,}"
            expected, todo = f"{expected}, the tokens of {self._tokenizer}", self._other_field
            raise bad_data(self.name, what, got, expected, todo)
        return tokens[: len(row)].astype(np.uint16)


def _take(documents: Iterator[str | np.ndarray]) -> Pieces:
    batch: list[tuple[bool, str | np.ndarray]] = []
    size = 0
    for text in documents:
        batch.append((True, text))
        size += len(text)
        if size >= shard_writer.BATCH_CHARS:
            break
    return batch


def _nominal_tokens(version: str | None) -> int | None:
    """Return the tokens that a name such as sample-10BT states; FineWeb's have a few per cent more."""
    match = re.search(r"(\d+)BT$", version or "")
    return int(match[1]) * 10**9 if match else None
