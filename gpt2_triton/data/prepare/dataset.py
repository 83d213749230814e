"""A dataset of the Hugging Face Hub, or a folder, as shards: val_000000.bin, train_000001.bin, train_000002.bin, ...

Documents are streamed in their order, each after an end-of-text token, and the first shard is validation: the layout
of llm.c's fineweb.py.
"""

import copy
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton.console import print_line
from gpt2_triton.data.prepare import build, documents
from gpt2_triton.data.prepare.build import PROGRESS, SHARD_TOKENS, Batch, Log, ShardRecords, count_tokens
from gpt2_triton.data.prepare.documents import File, Reading
from gpt2_triton.data.prepare.hub import hub_errors, repository
from gpt2_triton.data.shards import RECORD, read_record
from gpt2_triton.errors import DataError

AGAIN = "run the same command again: it resumes after the last finished shard"
OFFLINE = "check the name in --source and the network, or give a folder of its files, or use `prepare text`"
CARD = {"README.md", "dataset_infos.json"}  # in a copy of a dataset of the Hub

Piece = tuple[bool, str]  # whether the end-of-text token comes first, and text


class Dataset(NamedTuple):
    """A dataset's name on the Hub, or a folder of files."""

    name: str
    version: str | None = None  # its configuration, as sample-10BT
    revision: str | None = None  # branch or commit; by default the newest commit of main
    field: str = "text"

    @property
    def is_folder(self) -> bool:
        return Path(self.name).is_dir()


def prepare_dataset(
    dataset: Dataset,
    out_dir: Path,
    tokenizer: str,
    tokens: int | None = None,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    endoftext: bool = True,
    strict: bool = False,
    log: Log = print_line,
) -> Path:
    """Tokenise a dataset, or its first `tokens` tokens, into out_dir.

    The validation shard has shard_tokens tokens like the others, but at most a tenth of `tokens`.
    DataError if `strict` and anything is left out.
    """
    if dataset.is_folder and (dataset.version or dataset.revision):
        raise DataError(f"--version, --revision: go with the Hub, and {dataset.name} is a folder; name a folder in it")
    dataset = dataset._replace(revision=_commit(dataset, out_dir))
    val_tokens = min(shard_tokens, (tokens or 1 << 62) // 10)
    recipe: dict[str, Any] = dict(tokenizer=tokenizer, tokens=tokens, shard_tokens=shard_tokens, val_tokens=val_tokens)
    recipe |= dict(source=dataset._asdict()) | (dict(endoftext=endoftext) if endoftext or dataset.is_folder else {})
    source, begun = _Documents(dataset, Reading(dataset.field, endoftext), strict, recipe), time.monotonic()
    if dataset.is_folder:
        recipe["folder"] = _digest(source.files)
    if build.build(source, recipe, out_dir, source.size or shard_tokens, workers, log):
        shards, took = read_record(out_dir / RECORD)["shards"], timedelta(seconds=round(time.monotonic() - begun))
        documents.report(source.notes, log)
        log(f"prepared {out_dir}: {len(shards)} shards, {count_tokens(shards):,} tokens, in {took}")
    return out_dir


def _digest(files: list[File]) -> str:
    """Return the number of files, and a digest of their names, sizes and times."""
    stats = ((file.name, file.path.stat()) for file in files)
    rows = "".join(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n" for name, stat in stats)
    return f"{len(files)} files, {hashlib.sha256(rows.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


def _commit(dataset: Dataset, out_dir: Path) -> str | None:
    """Return the commit to read: the recorded one if a preparation is resumed; None for a folder."""
    if dataset.is_folder:
        return None
    if re.fullmatch(r"[0-9a-f]{40}", dataset.revision or ""):
        return dataset.revision
    for record in (RECORD, PROGRESS):
        recorded = read_record(out_dir / record).get("source")
        if dataset.revision is None and isinstance(recorded, dict) and recorded.get("name") == dataset.name:
            return recorded.get("revision")
    return repository(dataset.name, dataset.revision, OFFLINE, expand=["sha"]).sha


class _Documents:
    """The documents of a dataset as a Source; a state is a place in its files or rows, and the notes until there."""

    unit = "tokens"

    def __init__(self, dataset: Dataset, how: Reading, strict: bool, recipe: dict[str, Any]):
        self._dataset, self._how, self._strict, self._recipe = dataset, how, strict, recipe
        self.name, self.size = dataset.name, recipe["tokens"] or _nominal_tokens(dataset.version)
        self.files, self.notes = documents.find_files([Path(self.name)]) if dataset.is_folder else ([], {})
        for card in [file for file in self.files if file.name in CARD]:
            self.files.remove(card)
            documents.note(self.notes, "files that describe the dataset", card.path)
        self._place: Callable[[], Any]  # of the rows or texts that were yielded last

    def next_shard(self, split: str, shards: ShardRecords) -> tuple[str, int] | None:
        number, left = len(shards), (self._recipe["tokens"] or 1 << 62) - count_tokens(shards)
        name, size = ("train", "shard_tokens") if number else ("val", "val_tokens")
        return (f"{name}_{number:06d}.bin", min(left, self._recipe[size])) if left else None

    def batches(self, state: Any) -> Iterator[Batch]:
        """Yield batches of documents with BATCH_CHARS characters or more."""
        if state and "notes" not in state:  # begun by version 0.2
            state = {"place": [state, 0], "notes": {}}
        self.notes = copy.deepcopy(state["notes"]) if state else self.notes
        pieces: list[Piece] = []
        size = 0
        for more in (self._of_folder if self._dataset.is_folder else self._of_hub)(state):
            pieces += more
            size += sum(len(text) for _, text in more)
            if size >= build.BATCH_CHARS:
                documents.require_all(self.notes, self._strict)
                yield Batch("", state, pieces)
                state, pieces, size = {"place": self._place(), "notes": copy.deepcopy(self.notes)}, [], 0
        documents.require_all(self.notes, self._strict)
        if pieces:
            yield Batch("", state, pieces)
        elif state is None:
            raise documents.no_text(self.name, self.notes)

    def _of_folder(self, state: Any) -> Iterator[list[Piece]]:
        """Yield each text of the files; those before `state` are read and dropped."""
        first, done = state["place"] if state else (0, 0)
        i = n = 0
        self._place = lambda: [i, n]
        for i, file in enumerate(self.files[first:], first):
            last = 0
            for n, (document, text) in enumerate(documents.read(file.path, self._how, self.notes), 1):
                if i > first or n > done:
                    yield [(document != last, text)]
                elif n == done:
                    self.notes.clear()  # what was read again is in the state's notes
                    self.notes |= copy.deepcopy(state["notes"])
                last = document

    def _of_hub(self, state: Any) -> Iterator[list[Piece]]:
        """Yield the documents of each row from `state` on."""
        place, n = state["place"] if state else (None, 0)
        dataset = self._open(place)
        self._place = lambda: [dataset.state_dict(), n]

        def rows() -> Iterator[tuple[str, Any]]:
            nonlocal n
            following = iter(dataset)
            while True:
                with hub_errors(self.name, AGAIN):
                    row = next(following, None)
                if row is None:
                    return
                n += 1
                yield f"{self.name}, row {n:,}", row

        as_is = not self._how.endoftext and self._recipe["tokenizer"] != "bytes"  # as llm.c tokenises FineWeb
        for where, _, text in documents.texts_of_rows(rows(), self._how.field, self.notes):
            parts = [text] if as_is else documents.clean(where, text, self._how, self.notes)
            yield [(True, part) for part in parts if part]

    def _open(self, place: Any) -> Any:
        """Return a dataset of the Hub as an iterable of rows, from `place` on."""
        name, version, revision, field = self._dataset
        top = field.partition(".")[0]
        with hub_errors(name, OFFLINE):
            from datasets import load_dataset

            rows = load_dataset(name, version, split="train", revision=revision, streaming=True)
            names = rows.column_names or [*next(iter(rows), {top: ""})]
            if top not in names:
                what = f"no field {top!r}, it has {', '.join(names)}"
                raise DataError(f"{name}: {what}; name the field that holds the text as --field")
            rows = rows.select_columns([top])
            if place:
                rows.load_state_dict(place)
            return rows


def _nominal_tokens(version: str | None) -> int | None:
    """Return the tokens that a name such as sample-10BT states; FineWeb's have a few per cent more."""
    match = re.search(r"(\d+)BT$", version or "")
    return int(match[1]) * 10**9 if match else None
