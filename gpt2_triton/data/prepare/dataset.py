"""A dataset of the Hugging Face Hub, or a folder, as shards: val_000000.bin, train_000001.bin, train_000002.bin, ...

Documents are streamed in their order, each behind an end-of-text token, and the first shard is validation: the layout
of llm.c's fineweb.py.  A preparation that was stopped goes on: progress.json holds the finished shards and where in
the stream each begins, and the next one; at the end shards.json takes its place.  However often it was stopped, and
with however many workers, the bytes are those of one unbroken run.
"""

import functools
import hashlib
import itertools
import json
import re
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2_triton.data.prepare import shard_writer
from gpt2_triton.data.prepare.hub import asking, repository
from gpt2_triton.data.prepare.shard_writer import SHARD_TOKENS, Meter, Progress, Rows, Run, encode, print_now
from gpt2_triton.data.shards import RECORD, read_record
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import bad_data
from gpt2_triton.files import remove_abandoned, write_atomic

PROGRESS = "progress.json"
AGAIN = "run the same command again: it goes on after the last finished shard"
OFFLINE = "check the network, or give a folder of its files as --source, or use `prepare text`"
HIDDEN = re.compile(r"\..*\.([0-9]+)\.tmp")  # being written by the process of that number

Place = dict[str, Any]  # {"state": the stream before a batch, "first": sha256 of its first document, "skip": tokens}


class Source(NamedTuple):
    """Which texts: a dataset's name on the Hub, or a folder of parquet, jsonl or text files."""

    name: str
    version: str | None = None  # its configuration, as sample-10BT
    revision: str | None = None  # branch or commit; the newest commit of main
    field: str = "text"


def prepare_dataset(
    source: Source,
    out_dir: Path,
    tokenizer: str,
    tokens: int | None = None,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress = print_now,
) -> Path:
    """Tokenise a dataset, or its first `tokens` tokens, into out_dir.

    The validation shard has shard_tokens tokens like the others, but never more than a tenth of `tokens`.
    """
    source = source._replace(revision=_commit(source, out_dir))
    sizes = dict(tokens=tokens, shard_tokens=shard_tokens, val_tokens=min(shard_tokens, (tokens or 1 << 62) // 10))
    recipe: dict[str, Any] = dict(tokenizer=tokenizer, **sizes, source=source._asdict())
    if shard_writer.is_done(out_dir, recipe):
        progress(f"{out_dir} is prepared already")
        (out_dir / PROGRESS).unlink(missing_ok=True)
        return out_dir
    get_tokenizer(tokenizer)  # the workers find it in tiktoken's cache
    with shard_writer.written_to(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
        remove_abandoned(out_dir, HIDDEN)
    preparation, begun = _Preparation(source, recipe, out_dir, progress), time.monotonic()
    with shard_writer.workers(workers) as run:
        preparation.stream(run)
    rows = preparation.finish()
    total, took = sum(row["tokens"] for row in rows.values()), timedelta(seconds=round(time.monotonic() - begun))
    progress(f"prepared {out_dir}: {len(rows)} shards, {total:,} tokens, in {took}")
    return out_dir


def _commit(source: Source, out_dir: Path) -> str | None:
    """The commit to read, the recorded one where a preparation goes on; None for a folder."""
    if Path(source.name).is_dir():
        return None
    if re.fullmatch(r"[0-9a-f]{40}", source.revision or ""):
        return source.revision
    for record in (RECORD, PROGRESS):
        recorded = read_record(out_dir / record).get("source")
        if source.revision is None and isinstance(recorded, dict) and recorded.get("name") == source.name:
            return recorded.get("revision")
    return repository(source.name, source.revision, OFFLINE, expand=["sha"]).sha


# ---- the stream ----


def _open(source: Source, place: Place | None) -> Any:
    """The dataset as an iterable of rows, from the batch at `place` on."""
    expected = f"the dataset{f', configuration {source.version}' if source.version else ''}"
    with asking(source.name, expected, OFFLINE):
        from datasets import load_dataset

        rows = load_dataset(source.name, source.version, split="train", revision=source.revision, streaming=True)
        rows = rows.select_columns([source.field])
        if place:
            rows.load_state_dict(place["state"])
        return rows


class _Stream:
    """Tokens of a dataset from a place on, and the places where later ones begin."""

    def __init__(self, source: Source, place: Place | None):
        self._rows, self._field, self._start, self._name = _open(source, place), source.field, place, source.name
        self._batch: deque[Place] = deque()  # those under way, the oldest first
        self._place: Place = {}  # of the newest array given out
        self._length = self._given = 0  # tokens of that array, skipped ones too; tokens given out in all

    def tokens(self, run: Run, tokenizer: str, meter: Meter) -> Iterator[np.ndarray]:
        skip = self._start["skip"] if self._start else 0
        for _, tokens in run(functools.partial(encode, tokenizer), self._batches()):
            self._place, self._length = self._batch.popleft(), len(tokens)
            rest = tokens[skip:]
            skip -= len(tokens) - len(rest)
            self._given += len(rest)
            meter.add(len(rest), len(rest))
            yield rest

    def place(self, used: int) -> Place:
        """Where the token number `used` of those given out is found again; it is in the newest array, or follows it."""
        return self._place | {"skip": self._length - (self._given - used)}

    def _batches(self) -> Iterator[list[tuple[bool, str]]]:
        """Documents, build.PIECE characters or more together; the same ones from whichever place it starts."""
        documents = self._documents()
        state = self._start["state"] if self._start else self._rows.state_dict()
        while batch := _take(documents):
            first = hashlib.sha256(batch[0][1].encode()).hexdigest()
            if self._start and self._start["state"] == state and self._start["first"] != first:
                got, todo = "another document", "prepare it anew in another directory"
                raise bad_data(self._name, "it changed meanwhile", got, f"the one of sha256 {first}", todo)
            self._batch.append({"state": state, "first": first})
            state = self._rows.state_dict()
            yield batch

    def _documents(self) -> Iterator[str]:
        rows = iter(self._rows)
        while True:
            with asking(self._name, "its next document", AGAIN):
                row = next(rows, None)
            if row is None:
                return
            if not isinstance(row[self._field], str):
                got, todo = type(row[self._field]).__name__, "name the field that holds the text as --field"
                raise bad_data(self._name, f"no text in field {self._field!r}", got, "a string", todo)
            yield row[self._field]


def _take(documents: Iterator[str]) -> list[tuple[bool, str]]:
    batch, size = [], 0
    for text in documents:
        batch.append((True, text))
        size += len(text)
        if size >= shard_writer.PIECE:
            break
    return batch


# ---- the shards ----


class _Preparation:
    """Shards of a dataset in out_dir, from the first one that is missing or damaged on."""

    def __init__(self, source: Source, recipe: dict[str, Any], out_dir: Path, progress: Progress):
        self._source, self._recipe, self._dir, self._progress = source, recipe, out_dir, progress
        self._rows: Rows = {}
        self._places: list[Place | None] = [None]  # where each shard begins, and the one after them
        self._resume()

    def _resume(self) -> None:
        record = read_record(self._dir / PROGRESS)
        if not record:
            if any(self._dir.glob("*.bin")):
                raise shard_writer.in_use(self._dir)
            return
        rows, places = record.pop("shards"), record.pop("places")
        if not rows:
            return
        for key in sorted(key for key in self._recipe if record.get(key) != self._recipe[key]):
            what, todo = f"begun with another {key}", "give that again or choose another --out"
            raise bad_data(self._dir, what, self._recipe[key], record.get(key), todo)
        clock = shard_writer.Clock()
        for name, row in rows.items():
            if clock.due():
                self._progress(f"checked {len(self._rows):,} of {len(rows):,} finished shards")
            path = self._dir / name
            if not path.exists() or shard_writer.row_of(path) != row:
                self._progress(f"{path} is damaged: preparing again from there")
                break
            self._rows[name] = row
        self._places = places[: len(self._rows) + 1]
        self._progress(f"going on after {len(self._rows)} finished shards, {self._done():,} tokens")

    def _done(self) -> int:
        return sum(row["tokens"] for row in self._rows.values())

    def stream(self, run: Run) -> None:
        """Write the shards that are missing."""
        done, size = self._done(), self._recipe["tokens"] or _nominal_tokens(self._source.version)
        with shard_writer.written_to(self._dir):
            shard_writer.require_space(self._dir, max(0, size - done) if size else self._recipe["shard_tokens"])
            self._record()
            if done == self._recipe["tokens"]:
                return
            stream = _Stream(self._source, self._places[-1])
            tokens = stream.tokens(run, self._recipe["tokenizer"], Meter(size, "tokens", self._progress, done))
            for row in shard_writer.write_shards(self._dir, tokens, self._plan(done)):
                self._rows |= row
                self._places.append(stream.place(self._done() - done))
                self._record()

    def _plan(self, done: int) -> Iterator[tuple[str, int]]:
        """Names and sizes of the shards to come."""
        left = (self._recipe["tokens"] or 1 << 62) - done
        for number in itertools.count(len(self._rows)):
            name, size = ("train", "shard_tokens") if number else ("val", "val_tokens")
            size = min(left, self._recipe[size])
            if not size:
                return
            yield f"{name}_{number:06d}.bin", size
            left -= size

    def _record(self) -> None:
        record = self._recipe | {"shards": self._rows, "places": self._places}
        write_atomic(self._dir / PROGRESS, json.dumps(record, indent=1).encode())

    def finish(self) -> Rows:
        """The record of what is there now."""
        if len(self._rows) < 2:
            for name in (*self._rows, PROGRESS):  # they would stand in the way of what the message asks for
                (self._dir / name).unlink(missing_ok=True)
            got, expected = f"{self._done():,} tokens", f"more than the {self._recipe['val_tokens']:,} of validation"
            raise bad_data(self._source.name, "too little text", got, expected, "give that as --tokens, or less")
        with shard_writer.written_to(self._dir):
            rows = self._rows | shard_writer.lengthen_last(
                self._dir, list(self._rows)[1:], self._recipe["shard_tokens"]
            )
            write_atomic(self._dir / RECORD, json.dumps(self._recipe | {"shards": rows}, indent=1).encode())
            (self._dir / PROGRESS).unlink(missing_ok=True)
        return rows


def _nominal_tokens(version: str | None) -> int | None:
    """What a name such as sample-10BT says; FineWeb's have a few per cent more."""
    match = re.search(r"(\d+)BT$", version or "")
    return int(match[1]) * 10**9 if match else None
