"""A dataset of the Hugging Face Hub, or a folder, as shards: val_000000.bin, train_000001.bin, train_000002.bin, ...

Documents are streamed in their order, each after an end-of-text token, and the first shard is validation: the layout
of llm.c's fineweb.py.
"""

import hashlib
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton.console import print_line
from gpt2_triton.data.prepare import build
from gpt2_triton.data.prepare.build import PROGRESS, SHARD_TOKENS, Batch, Log, ShardRecords, count_tokens
from gpt2_triton.data.prepare.hub import hub_errors, repository
from gpt2_triton.data.shards import RECORD, read_record
from gpt2_triton.errors import DataError

AGAIN = "run the same command again: it resumes after the last finished shard"
FILES = "correct the file that cannot be read, or leave it out; files are parquet, JSON lines or text in UTF-8"
OFFLINE = "check the name in --source and the network, or give a folder of its files, or use `prepare text`"


class Dataset(NamedTuple):
    """A dataset's name on the Hub, or a folder of parquet, jsonl or text files."""

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
    log: Log = print_line,
) -> Path:
    """Tokenise a dataset, or its first `tokens` tokens, into out_dir.

    The validation shard has shard_tokens tokens like the others, but at most a tenth of `tokens`.
    """
    dataset = dataset._replace(revision=_commit(dataset, out_dir))
    val_tokens = min(shard_tokens, (tokens or 1 << 62) // 10)
    recipe: dict[str, Any] = dict(
        tokenizer=tokenizer, tokens=tokens, shard_tokens=shard_tokens, val_tokens=val_tokens, source=dataset._asdict()
    )
    if dataset.is_folder:
        recipe["folder"] = _files_of(Path(dataset.name), out_dir)
    source, begun = _Rows(dataset, tokens, val_tokens, shard_tokens), time.monotonic()
    if build.build(source, recipe, out_dir, source.size or shard_tokens, workers, log):
        shards, took = read_record(out_dir / RECORD)["shards"], timedelta(seconds=round(time.monotonic() - begun))
        log(f"prepared {out_dir}: {len(shards)} shards, {count_tokens(shards):,} tokens, in {took}")
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
    if dataset.is_folder:
        return None
    if re.fullmatch(r"[0-9a-f]{40}", dataset.revision or ""):
        return dataset.revision
    for record in (RECORD, PROGRESS):
        recorded = read_record(out_dir / record).get("source")
        if dataset.revision is None and isinstance(recorded, dict) and recorded.get("name") == dataset.name:
            return recorded.get("revision")
    return repository(dataset.name, dataset.revision, OFFLINE, expand=["sha"]).sha


class _Rows:
    """The rows of a dataset as a Source; a state is what `datasets` returns as one."""

    unit = "tokens"

    def __init__(self, dataset: Dataset, tokens: int | None, val_tokens: int, shard_tokens: int):
        self._dataset, self._tokens, self._val_tokens, self._shard_tokens = dataset, tokens, val_tokens, shard_tokens
        self.name, self.size = dataset.name, tokens or _nominal_tokens(dataset.version)

    def next_shard(self, split: str, shards: ShardRecords) -> tuple[str, int] | None:
        number, left = len(shards), (self._tokens or 1 << 62) - count_tokens(shards)
        name, size = ("train", self._shard_tokens) if number else ("val", self._val_tokens)
        return (f"{name}_{number:06d}.bin", min(left, size)) if left else None

    def batches(self, state: Any) -> Iterator[Batch]:
        """Yield batches of documents with BATCH_CHARS characters or more."""
        rows = self._open(state)
        texts = self._texts(rows)
        state, pieces, size = state or rows.state_dict(), [], 0
        for text in texts:
            pieces.append((True, text))
            size += len(text)
            if size >= build.BATCH_CHARS:
                yield Batch("", state, pieces)
                state, pieces, size = rows.state_dict(), [], 0
        if pieces:
            yield Batch("", state, pieces)

    def _open(self, state: Any) -> Any:
        """Return the dataset as an iterable of rows, from `state` on."""
        name, version, revision, field = self._dataset
        with hub_errors(name, OFFLINE):
            from datasets import load_dataset

            rows = load_dataset(name, version, split="train", revision=revision, streaming=True)
            names = rows.column_names or [*next(iter(rows), {field: ""})]
            if field not in names:
                has = ", ".join(names)
                raise DataError(
                    f"{name}: no field {field!r}, it has {has}; name the field that holds the text as --field"
                )
            rows = rows.select_columns([field])
            if state:
                rows.load_state_dict(state)
            return rows

    def _texts(self, dataset: Any) -> Iterator[str]:
        rows, field = iter(dataset), self._dataset.field
        while True:
            with hub_errors(self.name, FILES if self._dataset.is_folder else AGAIN):
                row = next(rows, None)
            if row is None:
                return
            if not isinstance(row[field], str):
                what = f"no text in field {field!r}, but {type(row[field]).__name__}"
                raise DataError(f"{self.name}: {what}; correct or remove such rows, or name the field as --field")
            yield row[field]


def _nominal_tokens(version: str | None) -> int | None:
    """Return the tokens that a name such as sample-10BT states; FineWeb's have a few per cent more."""
    match = re.search(r"(\d+)BT$", version or "")
    return int(match[1]) * 10**9 if match else None
