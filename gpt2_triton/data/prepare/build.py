"""From documents to a directory of shards: tokenise by several processes, cut, record.

progress.json holds the finished shards, and the places in the source where they and the next shard
begin.  At the end shards.json replaces it.  The same command resumes a stopped preparation after
its last finished shard.  The bytes depend neither on stops nor on the number of processes.
"""

import fcntl
import functools
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpt2_triton.console import Progress, counted, print_line
from gpt2_triton.data.prepare.workers import paired_map
from gpt2_triton.data.shards import (
    RECORD,
    map_tokens,
    read_header,
    token_dtype,
    write_shard,
)
from gpt2_triton.data.tokenizer import encode_rest, get_tokenizer, keep, record_of, with_delimiter
from gpt2_triton.errors import DataError
from gpt2_triton.files import FULL, free_space, object_in, sha256, write_json

PROGRESS = "progress.json"
LOCK = ".lock"
BATCH_CHARS = 1 << 20  # characters tokenised at a time, by one process
SHARD_TOKENS = 100_000_000  # llm.c's

ShardRecords = dict[str, dict[str, Any]]  # {"tokens": ..., "sha256": ...} of each shard, by name
# {"state": the source before a batch, "skip": tokens of the batch to skip}, for JSON
Place = dict[str, Any]


class Piece(NamedTuple):
    """Text, or tokens, of one document."""

    content: str | np.ndarray
    follows: bool = False  # a document after another: the delimiter comes first
    rest: bool = False  # the document has text before this


class Batch(NamedTuple):
    """Text that one process tokenises at a time, or tokens."""

    split: str  # of its shards; the batches of a split follow each other
    state: Any  # of the source before this batch, for JSON
    pieces: Sequence[Piece]

    @property
    def characters(self) -> int:
        """The characters of its text, or the number of its tokens."""
        return sum(len(piece.content) for piece in self.pieces)


class Source(Protocol):
    """Documents in a fixed order."""

    name: str
    # of the progress: "tokens" or "characters"; a state of a source in characters is their number
    unit: str
    size: int | None  # in that unit, if known

    def batches(self, state: Any) -> Iterator[Batch]:
        """Yield batches from `state` on (None: from the beginning); equal
        states give equal batches.
        """

    def next_shard(self, split: str, shards: ShardRecords) -> tuple[str, int] | None:
        """Return the name and the largest size of the shard after `shards`; None after the last."""


def build(
    source: Source, recipe: dict[str, Any], out_dir: Path, expected_tokens: int, workers: int
) -> bool:
    """Write the shards of `source` into out_dir; return False if they are there already.

    recipe            everything that determines the bytes; shards.json records it, with the
                      hash of a tokenizer's file
    expected_tokens   an estimate, to check the space on the disk

    DataError if out_dir has other shards, or a preparation begun with another recipe.
    """
    tokenizer = recipe["tokenizer"]
    recipe = recipe | record_of(tokenizer)
    with disk_errors(out_dir):
        if not is_done(out_dir, recipe):
            with _locked(out_dir), _saying_how_to_go_on():
                if not is_done(out_dir, recipe):  # by a process that held the lock
                    _build(source, tokenizer, recipe, out_dir, expected_tokens, workers)
                    _report(out_dir)
                    return True
                _remove(out_dir, LOCK)
        print_line(f"{out_dir} is prepared already")
        return False


@contextmanager
def _saying_how_to_go_on() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print_line("stopped: the same command goes on after the finished shards", error=True)
        raise


def _report(out_dir: Path) -> None:
    shards = object_in(out_dir / RECORD)["shards"]
    train = count_tokens(shards, "train")
    val = count_tokens(shards, "val")
    print_line(
        f"prepared {out_dir}: {len(shards)} shards, "
        f"{train:,} tokens to train on, {val:,} tokens for validation"
    )


def _build(
    source: Source,
    tokenizer: str,
    recipe: dict[str, Any],
    out_dir: Path,
    expected_tokens: int,
    workers: int,
) -> None:
    """Tokenise what is left; at the end the record replaces the progress."""
    dtype = token_dtype(get_tokenizer(tokenizer).vocab_size)  # workers find it in tiktoken's cache
    shards, places = _resume(recipe, out_dir)
    done = count_tokens(shards)
    require_space(out_dir, max(0, expected_tokens - done) * dtype.itemsize)
    _record_progress(out_dir, recipe, shards, places)
    start = places[-1] or {"state": None, "skip": 0}
    before = done
    if source.unit == "characters":
        before = start["state"] or 0
    title = f"preparing {source.name}"
    with paired_map(workers) as run, Progress(title, source.size, source.unit, before) as progress:
        encode = functools.partial(tokenize, tokenizer, recipe.get("endoftext", False))
        tokenised = run(encode, source.batches(start["state"]))
        for name, tokens, place in _cut(source, shards, tokenised, start["skip"], progress):
            write_shard(out_dir / name, tokens)
            shards[name] = shard_record(out_dir / name)
            places.append(place)
            _record_progress(out_dir, recipe, shards, places)
    if not count_tokens(shards, "train"):
        # else the command that the message suggests would be refused
        _remove(out_dir, *shards, PROGRESS)
        raise DataError(
            f"{source.name}: too little text: the validation shard takes all "
            f"{count_tokens(shards):,} tokens; give that number as --tokens, or less"
        )
    for split in ("train", "val"):
        names = [name for name in shards if name.startswith(split)]
        shards |= balance_last_two(out_dir, names, recipe["shard_tokens"])
    keep(tokenizer, out_dir)
    write_json(out_dir / RECORD, recipe | {"shards": shards})
    _remove(out_dir, PROGRESS, LOCK)


def tokenize(tokenizer: str, special: bool, batch: Batch) -> np.ndarray:
    """Return the tokens of a batch, as its tokenizer's `encode` does."""
    coder = get_tokenizer(tokenizer)
    parts = []
    for piece in batch.pieces:
        tokens = piece.content
        if isinstance(tokens, str):
            encode = functools.partial(encode_rest, coder) if piece.rest else coder.encode
            tokens = encode(tokens, special)
        parts.append(with_delimiter(coder, tokens) if piece.follows else tokens)
    return np.concatenate(parts)


def _cut(
    source: Source,
    shards: ShardRecords,
    tokenised: Iterator[tuple[Batch, np.ndarray]],
    skip: int,
    progress: Progress,
) -> Iterator[tuple[str, np.ndarray, Place]]:
    """Yield (name, tokens, place after them) of each shard, without the first `skip` tokens."""
    for split, of_split in itertools.groupby(tokenised, key=lambda pair: pair[0].split):
        rest = np.empty(0, np.uint16)  # of the newest batch
        while shard := source.next_shard(split, shards):
            name, size = shard
            held = [rest]
            missing = size - len(rest)
            while missing > 0 and (pair := next(of_split, None)):
                batch, tokens = pair
                new = tokens[skip:]
                skip = max(0, skip - len(tokens))
                held.append(new)
                missing -= len(new)
                progress.advance(batch.characters if source.unit == "characters" else len(new))
            joined = np.concatenate(held)
            if not len(joined):
                break
            rest = joined[size:].copy()  # a view would keep the whole shard in memory
            place = {"state": batch.state, "skip": len(tokens) - len(rest)}
            yield name, joined[:size], place  # the caller adds it to `shards`
        else:
            return


# ---- the directory ----


def _resume(recipe: dict[str, Any], out_dir: Path) -> tuple[ShardRecords, list[Place | None]]:
    """Return the finished shards, and where each and the next one begin (None: the start)."""
    record = object_in(out_dir / PROGRESS)
    shards = {}
    if not record and ((out_dir / RECORD).exists() or any(out_dir.glob("*.bin"))):
        raise directory_in_use(out_dir)
    if not record.get("shards"):
        return {}, [None]
    found = record.pop("shards")
    places = record.pop("places")
    for key in sorted(key for key in recipe if record.get(key) != recipe[key]):
        then = textwrap.shorten(str(record.get(key)), 300)
        now = textwrap.shorten(str(recipe[key]), 300)
        raise DataError(
            f"{out_dir}: begun with another {key}: {then}, now {now}; "
            "give that again, remove the directory, or choose another --out"
        )
    with Progress("checking finished shards", count_tokens(found), "tokens") as progress:
        for name, row in found.items():
            path = out_dir / name
            if not path.exists() or sha256(path) != row["sha256"]:
                print_line(f"{path} is damaged: preparing again from there")
                break
            shards[name] = row
            progress.advance(row["tokens"])
    finished = counted(len(shards), "finished shard")
    print_line(f"resuming after {finished}, {count_tokens(shards):,} tokens")
    return shards, places[: len(shards) + 1]


def numbered(split: str, shards: ShardRecords) -> str:
    """Return the name of a split's shard after `shards`."""
    return f"{split}_{sum(name.startswith(split) for name in shards):06d}.bin"


def _record_progress(
    out_dir: Path, recipe: dict[str, Any], shards: ShardRecords, places: list[Place | None]
) -> None:
    write_json(out_dir / PROGRESS, recipe | {"shards": shards, "places": places})


def balance_last_two(directory: Path, names: list[str], limit: int) -> ShardRecords:
    """Halve the last two shards if the last has fewer than limit / 2 tokens;
    return the changed records.
    """
    if len(names) < 2 or 2 * len(map_tokens(directory / names[-1])) >= limit:
        return {}
    tokens = np.concatenate([map_tokens(directory / name) for name in names[-2:]])
    for name, half in zip(names[-2:], np.array_split(tokens, 2)):
        write_shard(directory / name, half)
    return {name: shard_record(directory / name) for name in names[-2:]}


def shard_record(path: Path) -> dict[str, Any]:
    """Return a shard's row of shards.json."""
    return {"tokens": read_header(path)[1], "sha256": sha256(path)}


def count_tokens(shards: ShardRecords, split: str = "") -> int:
    """Return the tokens of the shards of a split, or of all."""
    return sum(row["tokens"] for name, row in shards.items() if name.startswith(split))


def is_done(out_dir: Path, recipe: dict[str, Any]) -> bool:
    """Return whether out_dir holds what `recipe` makes, by its record
    and the sizes of its shards.
    """
    record = object_in(out_dir / RECORD)
    shards = record.pop("shards", {})
    try:
        return record == recipe and all(
            read_header(out_dir / name)[1] == shards[name]["tokens"] for name in shards
        )
    except (DataError, OSError):
        return False


def _remove(out_dir: Path, *names: str) -> None:
    for name in names:
        (out_dir / name).unlink(missing_ok=True)


def directory_in_use(place: Path) -> DataError:
    """Return the error about a directory that holds other data."""
    return DataError(
        f"{place}: in use: it holds other data; choose another directory as --out, or remove it"
    )


def require_space(directory: Path, size: int) -> None:
    """DataError unless shards of `size` more bytes fit on the disk."""
    free = free_space(directory)
    if free < size:
        raise DataError(
            f"{directory}: not enough room: {size:,} bytes needed, {free:,} free; "
            "make room or choose another directory"
        )


@contextmanager
def disk_errors(out_dir: Path) -> Iterator[None]:
    """Raise an OSError of the block as a DataError about out_dir."""
    try:
        yield
    except OSError as error:
        todo = "choose another directory, or correct its permissions"
        if error.errno in FULL:
            todo = "make room"
        raise DataError(f"{out_dir}: cannot write: {error.strerror or error}; {todo}") from None


@contextmanager
def _locked(out_dir: Path) -> Iterator[None]:
    """Lock out_dir by a file that stays until shards.json is there; wait for another's lock."""
    out_dir.mkdir(parents=True, exist_ok=True)
    with open(out_dir / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_line(f"waiting for another process that prepares {out_dir}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # no locks here: processes with one recipe write the same bytes
            pass
        else:  # only under a lock: another host may be writing its file
            for hidden in out_dir.glob(".*.tmp"):
                hidden.unlink()
        try:
            yield
        except DataError:
            if not (out_dir / PROGRESS).exists():  # refused before anything was made
                _remove(out_dir, LOCK)
                with suppress(OSError):  # not empty
                    out_dir.rmdir()
            raise
