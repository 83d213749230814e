"""Text files as a data directory: train_000000.bin, train_000001.bin, ..., val_000000.bin, ..., and shards.json.

Texts are read twice, to measure and to tokenise, and are never held whole.  The directory is built under a hidden name
next to its place, where a stopped preparation is resumed, and renamed once: it is there whole or not at all.  Preparing
the same thing again finds it done; a second process waits for the first and uses its shards.  If the file system cannot
lock directories, as most of NFS, each process builds its own directory, none is resumed, and the first renamed is used.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton.console import Progress, print_line
from gpt2_triton.data.prepare import pipeline, shard_writer
from gpt2_triton.data.prepare.documents import File, find_files, measure, read, split_at_whitespace
from gpt2_triton.data.prepare.pipeline import Batch
from gpt2_triton.data.prepare.shard_writer import SHARD_TOKENS, Log, ParallelMap, Pieces, ShardRecords
from gpt2_triton.data.shards import RECORD, read_record
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import DataError, bad_data
from gpt2_triton.files import MARK, process_mark, remove_abandoned

Text = tuple[Any, str]  # part of a document: the parts of one follow each other and have the same key

CHARACTERS = {"bytes": 1, "gpt2": 5}  # per token; more than most text has, so that no disk with room is refused


class MeasuredText(NamedTuple):
    """Files of text, the sha256 of each, and their characters in all."""

    files: list[File]
    digests: list[str]
    characters: int

    @property
    def digest(self) -> str:
        """The sha256 of the whole text, whatever its files are called."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()


def measure_text(inputs: Sequence[Path], workers: int = 1) -> MeasuredText:
    """Read files, folders and globs of text; DataError if one is no text."""
    files = find_files(inputs)
    with shard_writer.workers(_processes(files, workers)) as run:
        measured = _measure(files, run)
    return MeasuredText(files, [digest for digest, _ in measured], sum(count for _, count in measured))


def prepare_text(
    inputs: Sequence[Path],
    out_dir: Path,
    tokenizer: str,
    val_fraction: float = 0.1,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    log: Log = print_line,
) -> Path:
    """Tokenise files, folders and globs of text into out_dir; the last val_fraction of characters is validation."""
    measured = measure_text(inputs, workers)
    return prepare_measured(measured, out_dir, tokenizer, val_fraction, workers, shard_tokens, log)


def prepare_measured(
    measured: MeasuredText,
    out_dir: Path,
    tokenizer: str,
    val_fraction: float = 0.1,
    workers: int = 1,
    shard_tokens: int = SHARD_TOKENS,
    log: Log = print_line,
) -> Path:
    """Tokenise text that has been measured, as `prepare_text` does."""
    files = measured.files
    rows = [{"file": name, "sha256": digest} for (_, name), digest in zip(files, measured.digests, strict=True)]
    recipe = dict(tokenizer=tokenizer, val_fraction=val_fraction, shard_tokens=shard_tokens, source=rows)

    def texts() -> Iterator[Text]:
        return (((i, document), text) for i, (path, _) in enumerate(files) for document, text in read(path))

    with shard_writer.workers(_processes(files, workers)) as run:
        return prepare_texts(texts, measured.characters, recipe, Path(out_dir), log, run)


def _processes(files: list[File], workers: int) -> int:
    return min(workers, sum(path.stat().st_size for path, _ in files) // shard_writer.BATCH_CHARS)


def _measure(files: list[File], run: ParallelMap) -> list[tuple[str, int]]:
    """Return (sha256, characters) of each file."""
    measured = []
    with Progress("measuring", len(files), "files") as progress:
        for row in run(measure, [path for path, _ in files]):
            measured.append(row)
            progress.advance(1)
    return measured


def prepare_texts(
    texts: Callable[[], Iterable[Text]], size: int, recipe: dict[str, Any], out_dir: Path, log: Log, run: ParallelMap
) -> Path:
    """Tokenise the texts that `texts` returns, `size` characters in all, into out_dir."""
    cut = int(size * (1 - recipe["val_fraction"]))
    if not 0 < cut < size:
        expected = "between 0 and 1, so that training and validation get a character each"
        got = f"{recipe['val_fraction']} of {size:,} characters"
        raise bad_data("val_fraction", "an empty split", got, expected, "change val_fraction or give more text")
    with shard_writer.disk_errors_as(out_dir):
        if _is_prepared(out_dir, recipe, log):
            _remove_leftovers(out_dir)
            return out_dir
        get_tokenizer(recipe["tokenizer"])  # the workers find it in tiktoken's cache
        with _hidden_directory(out_dir, log) as hidden:
            if _is_prepared(out_dir, recipe, log):  # by the process that held the lock
                return out_dir
            _build(hidden, _Texts(texts, size, cut, recipe["shard_tokens"]), recipe, log, run)
            _put_in_place(hidden, out_dir, recipe)
    shards = read_record(out_dir / RECORD)["shards"]
    tokens = ", ".join(
        f"{sum(shard['tokens'] for name, shard in shards.items() if name.startswith(split)):,} tokens {use}"
        for split, use in (("train", "to train on"), ("val", "for validation"))
    )
    log(f"prepared {out_dir}: {len(shards)} shards, {tokens}")
    return out_dir


def _is_prepared(out_dir: Path, recipe: dict[str, Any], log: Log) -> bool:
    """Return whether out_dir holds these shards; DataError if it holds anything else."""
    occupied = shard_writer.is_occupied(out_dir)  # before is_done: another process may rename its shards in between
    if shard_writer.is_done(out_dir, recipe):
        log(f"{out_dir} is prepared already")
        return True
    if occupied:
        raise shard_writer.directory_in_use(out_dir)
    return False


@contextmanager
def _hidden_directory(out_dir: Path, log: Log) -> Iterator[Path]:
    """Yield the directory to build in, which keeps what a stopped preparation has written.

    If it cannot be locked, yield a new one instead, which no other process uses and which is removed at the end.
    """
    shared = out_dir.absolute().with_name(f".{out_dir.name}.partial")
    with pipeline.locked(shared, log) as held:
        own = shared.with_name(f".{out_dir.name}.{socket.gethostname()}-{process_mark()}-{os.urandom(4).hex()}.partial")
        _remove_abandoned(out_dir)
        try:
            if not held:
                own.mkdir()
            yield shared if held else own
        finally:
            shutil.rmtree(own, ignore_errors=True)
            with contextlib.suppress(OSError):  # it is not empty, or has been renamed
                shared.rmdir()


def _remove_abandoned(out_dir: Path) -> None:
    """Remove the directories that processes of this host built in without a lock and did not finish."""
    name, host = re.escape(out_dir.name), re.escape(socket.gethostname())
    remove_abandoned(out_dir.absolute().parent, re.compile(rf"\.{name}\.{host}-{MARK}-[0-9a-f]{{8}}\.partial"))


def _remove_leftovers(out_dir: Path) -> None:
    """Remove what stopped preparations of out_dir left, since it is there now, but not what a process has locked."""
    _remove_abandoned(out_dir)
    shared = out_dir.absolute().with_name(f".{out_dir.name}.partial")
    with contextlib.suppress(OSError):  # there is none, or it is locked
        handle = os.open(shared, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(shared, ignore_errors=True)
        finally:
            os.close(handle)


def _put_in_place(hidden: Path, out_dir: Path, recipe: dict[str, Any]) -> None:
    """Rename the finished directory, or remove it if another process was first with the same shards."""
    try:
        os.rename(hidden, out_dir)  # replaces an empty directory, and fails on anything else
    except OSError:
        if shard_writer.is_done(out_dir, recipe):
            shutil.rmtree(hidden, ignore_errors=True)
        elif shard_writer.is_occupied(out_dir):
            raise shard_writer.directory_in_use(out_dir) from None
        else:
            raise


def _build(hidden: Path, source: "_Texts", recipe: dict[str, Any], log: Log, run: ParallelMap) -> None:
    """Write the shards into `hidden`, from where a preparation of the same recipe was stopped."""
    if shard_writer.is_done(hidden, recipe):  # stopped before the rename
        return
    begun = read_record(hidden / pipeline.PROGRESS)
    if any(begun.get(key) != recipe[key] for key in recipe):
        _clear(hidden)
    preparation = pipeline.Preparation(source, recipe, hidden, log)
    try:
        preparation.write(run, source.size // CHARACTERS[recipe["tokenizer"]])
    except _TextChangedError:
        _clear(hidden)
        raise
    preparation.finish()


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


class _TextChangedError(DataError):
    """The text is not the one that was measured."""

    def __init__(self, got: int, expected: int):
        todo = "leave the files alone and start again"
        error = bad_data("text", "it changed meanwhile", f"{got:,} characters", f"the {expected:,} of before", todo)
        super().__init__(*error.args)


class _Texts:
    """Texts as a Source: the first `cut` characters are training data, the rest is validation.

    A state counts the batches and the characters before a batch.
    """

    name, unit = "text", "characters"

    def __init__(self, texts: Callable[[], Iterable[Text]], size: int, cut: int, shard_tokens: int):
        self.size, self._texts, self._cut, self._shard_tokens = size, texts, cut, shard_tokens

    def done(self, state: Any, tokens: int) -> int:
        return state["characters"]

    def plan(self, split: str, shards: ShardRecords) -> Iterator[tuple[str, int]]:
        first = sum(name.startswith(split) for name in shards)
        return ((f"{split}_{number:06d}.bin", self._shard_tokens) for number in itertools.count(first))

    def batches(self, state: Any) -> Iterator[Batch]:
        """Yield batches from `state` on; the text before it is read and dropped."""
        start, found, characters = state or {"batch": 0, "characters": 0}, False, 0
        for number, (split, pieces) in enumerate(self._all_batches()):
            here = {"batch": number, "characters": characters}
            found = found or here == start
            if found:
                yield Batch(split, here, pieces)
            characters += sum(len(text) for _, text in pieces)
        if not found or characters != self.size:
            raise _TextChangedError(characters, self.size)

    def _all_batches(self) -> Iterator[tuple[str, Pieces]]:
        for split, parts in itertools.groupby(_split(self._texts(), self._cut), key=itemgetter(0)):
            for batch in _batches(text for _, text in parts):
                yield split, batch


def _split(texts: Iterable[Text], cut: int) -> Iterator[tuple[str, Text]]:
    """Yield the first `cut` characters of the documents for train, the rest for val."""
    for key, text in texts:
        if text[:cut]:
            yield "train", (key, text[:cut])
        if text[cut:]:
            yield "val", (key, text[cut:])
        cut = max(0, cut - len(text))


def _batches(texts: Iterable[Text]) -> Iterator[Pieces]:
    """Yield batches of pieces, BATCH_CHARS characters or more together.

    The end-of-text token precedes the first piece of each document but the first.
    """
    batch, size = [], 0
    for number, (_, parts) in enumerate(itertools.groupby(texts, key=itemgetter(0))):
        for i, piece in enumerate(split_at_whitespace((text for _, text in parts), shard_writer.BATCH_CHARS)):
            batch.append((number > 0 and i == 0, piece))
            size += len(piece)
            if size >= shard_writer.BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
