"""A dataset of the Hugging Face Hub as shards: val_000000.bin,
train_000001.bin, train_000002.bin, ...

Documents are streamed in their order, each after an end-of-text token, and the first shard is
validation: the layout of llm.c's fineweb.py.
"""

import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton.data.prepare import build, documents
from gpt2_triton.data.prepare.build import (
    PROGRESS,
    SHARD_TOKENS,
    Batch,
    Piece,
    ShardRecords,
    count_tokens,
)
from gpt2_triton.data.prepare.documents import Reading
from gpt2_triton.data.prepare.hub import AGAIN, hub_errors, repository
from gpt2_triton.data.shards import RECORD
from gpt2_triton.errors import DataError
from gpt2_triton.files import object_in

ENDLESS = 1 << 62  # tokens
OFFLINE = "check the name in --source and the network, or use `prepare text` for its files"


class Dataset(NamedTuple):
    """A dataset of the Hub, and what to read of it."""

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
    endoftext: bool = True,
    strict: bool = False,
) -> Path:
    """Tokenise a dataset, or its first `tokens` tokens, into out_dir.

    The validation shard has shard_tokens tokens like the others, but at most a tenth of `tokens`.
    DataError if `strict` and anything is left out.
    """
    dataset = dataset._replace(revision=_commit(dataset, out_dir))
    val_tokens = min(shard_tokens, (tokens or ENDLESS) // 10)
    recipe: dict[str, Any] = dict(
        tokenizer=tokenizer, tokens=tokens, shard_tokens=shard_tokens, val_tokens=val_tokens
    )
    recipe |= dict(source=dataset._asdict()) | (dict(endoftext=True) if endoftext else {})
    source = _Documents(dataset, Reading(dataset.field, endoftext), strict, recipe)
    if build.build(source, recipe, out_dir, source.size or shard_tokens, workers):
        documents.report(source.notes, tokenizer)
    return out_dir


def _commit(dataset: Dataset, out_dir: Path) -> str | None:
    """Return the commit to read: the recorded one if a preparation is resumed."""
    if re.fullmatch(r"[0-9a-f]{40}", dataset.revision or ""):
        return dataset.revision
    for record in (RECORD, PROGRESS):
        recorded = object_in(out_dir / record).get("source")
        if (
            dataset.revision is None
            and isinstance(recorded, dict)
            and recorded.get("name") == dataset.name
        ):
            return recorded.get("revision")
    return repository(dataset.name, dataset.revision, OFFLINE, expand=["sha"]).sha


class _Documents:
    """The documents of a dataset as a Source; a state is a place in its rows,
    and the notes until there.
    """

    unit = "tokens"

    def __init__(self, dataset: Dataset, how: Reading, strict: bool, recipe: dict[str, Any]):
        self._dataset = dataset
        self._how = how
        self._strict = strict
        self._recipe = recipe
        # FineWeb's have a few per cent more
        nominal = re.search(r"(\d+)BT$", dataset.version or "")
        self.name = dataset.name
        self.size = recipe["tokens"] or (int(nominal[1]) * 10**9 if nominal else None)
        self.notes: documents.Notes = {}

    def next_shard(self, split: str, shards: ShardRecords) -> tuple[str, int] | None:
        left = (self._recipe["tokens"] or ENDLESS) - count_tokens(shards)
        if not left:
            return None
        number = len(shards)
        name, size = ("train", "shard_tokens") if number else ("val", "val_tokens")
        return f"{name}_{number:06d}.bin", min(left, self._recipe[size])

    def batches(self, state: Any) -> Iterator[Batch]:
        """Yield batches of documents with BATCH_CHARS characters or more."""
        place, before = state["place"] if state else (None, 0)
        self.notes = copy.deepcopy(state["notes"]) if state else {}
        dataset = self._open(place)
        as_is = not self._how.endoftext and self._recipe["tokenizer"] != "bytes"
        pieces: list[Piece] = []
        size = 0
        texts = documents.texts_of_rows(self._rows(dataset, before), self._how.field, self.notes)
        for n, (where, _, text) in enumerate(texts, before + 1):
            # as llm.c tokenises FineWeb, or as `prepare text` does
            parts = [text] if as_is else documents.clean(where, text, self._how, self.notes)
            pieces += [Piece(part, follows=True) for part in parts if part]
            size += sum(map(len, parts))
            if size >= build.BATCH_CHARS:
                documents.require_all(self.notes, self._strict)
                yield Batch("", state, pieces)
                state = {"place": [dataset.state_dict(), n], "notes": copy.deepcopy(self.notes)}
                pieces = []
                size = 0
        documents.require_all(self.notes, self._strict)
        if pieces:
            yield Batch("", state, pieces)

    def _rows(self, dataset: Any, before: int) -> Iterator[tuple[str, Any]]:
        """Yield (place, row); `before` rows precede the first."""
        following = iter(dataset)
        for n in itertools.count(before + 1):
            with hub_errors(self.name, AGAIN):
                row = next(following, None)
            if row is None:
                return
            yield f"{self.name}, row {n:,}", row

    def _open(self, place: Any) -> Any:
        """Return a dataset of the Hub as an iterable of rows, from `place` on."""
        name, version, revision, field = self._dataset
        with hub_errors(name, OFFLINE):
            from datasets import load_dataset

            rows = load_dataset(name, version, split="train", revision=revision, streaming=True)
            names = rows.column_names or [*next(iter(rows), {field: ""})]
        top = field if field in names else field.partition(".")[0]
        if top not in names:
            raise DataError(
                f"{name}: no field {top!r}, it has {', '.join(names)}; "
                "name the field that holds the text as --field"
            )
        rows = rows.select_columns([top])
        if place:
            rows.load_state_dict(place)
        return rows
