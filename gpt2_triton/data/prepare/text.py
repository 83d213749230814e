"""Text files as a data directory: train_000000.bin, train_000001.bin, ...,
val_000000.bin, ..., and shards.json.

Texts are read twice, to measure and to tokenise, and are never held whole.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton.console import Progress, command_line, print_line
from gpt2_triton.data.prepare import build, documents
from gpt2_triton.data.prepare.build import SHARD_TOKENS, Batch, Piece, ShardRecords
from gpt2_triton.data.prepare.contents import unreadable
from gpt2_triton.data.prepare.documents import AS_DOCUMENTS, File, Notes, Reading
from gpt2_triton.data.prepare.workers import paired_map
from gpt2_triton.data.tokenizer import NAMES, Tokenizer, get_tokenizer
from gpt2_triton.data.tokenizer_file import END_OF_TEXT
from gpt2_triton.errors import DataError

FEW_BYTES = 2.5  # a token of GPT-2, of another language than English
MANY_BYTES = 1.3  # of a character: then bytes as tokens waste them
SAMPLE_CHARS = 1 << 22  # of a text, tokenised to estimate its tokens
# part of a document: the parts of one follow each other and have the same key
Text = tuple[Any, str]


class MeasuredText(NamedTuple):
    """A user's text, read once: what it holds, and how its documents are read again."""

    files: list[File]
    digests: list[str]  # the sha256 of each
    sizes: list[int]  # the characters of each
    sample: list[str]  # of the text, to estimate its tokens
    notes: Notes
    how: Reading

    @property
    def characters(self) -> int:
        """The characters of all files."""
        return sum(self.sizes)

    @property
    def digest(self) -> str:
        """The sha256 of the whole text, of its files' names, which the shards
        record, and of how it is read.
        """
        read = f"{tuple(self.how)}{[name for _, name in self.files]}{self.digests}"
        if documents.markup(self.notes).keys() - {END_OF_TEXT}:
            read += "special"  # an earlier version took only END_OF_TEXT for a token
        return hashlib.sha256(read.encode()).hexdigest()

    def texts(self) -> Iterator[Text]:
        """Yield the documents in parts."""
        for i, (path, _) in enumerate(self.files):
            for n, text in documents.read(path, self.how, {}):
                yield (i, n), text

    def count_tokens(self, tokenizer: str) -> int:
        """Return the number of tokens: of a text that is longer than the sample, about."""
        sampled = sum(map(len, self.sample))
        encode = get_tokenizer(tokenizer).encode
        tokens = sum(len(encode(piece, special=self.how.endoftext)) for piece in self.sample)
        return round(self.characters * tokens / sampled) if sampled else self.characters

    def lost_samples(self, tokenizer: str) -> int:
        """Return how many pieces of the sample a tokenizer's file does not give back, but for
        spaces at the ends.
        """
        if tokenizer in NAMES:
            return 0
        coder = get_tokenizer(tokenizer)
        return sum(
            coder.decode(coder.encode(piece).tolist()).strip() != piece.strip()
            for piece in self.sample
        )


def measure_text(
    inputs: Sequence[Path], workers: int, how: Reading = AS_DOCUMENTS, strict: bool = False
) -> MeasuredText:
    """Read files, folders and globs of text; DataError that names the unreadable
    files, if there is no text, or if `strict` and anything is left out.
    """
    try:
        files, notes = documents.find_files(inputs)
        sizes = [path.stat().st_size for path, _ in files]
    except OSError as error:
        raise unreadable(error.filename, error) from None
    places = zip([path for path, _ in files], itertools.accumulate(sizes, initial=0))
    step = documents.PIECE * max(1, sum(sizes) // SAMPLE_CHARS)
    measure = functools.partial(documents.measure, how=how, step=step)
    measured: list[documents.Measured] = []
    with (
        paired_map(_processes(files, workers)) as run,
        Progress("measuring", len(files), "files") as progress,
    ):
        for _, one in run(measure, places):
            measured.append(one)
            for what, (times, where) in one.notes.items():
                documents.note(notes, what, where, times)
            progress.advance(1)
    faults = [fault for one in measured for fault in one.faults]
    characters = [one.characters for one in measured]
    if len(faults) > 20:
        faults[20:] = ["..."]
    if faults:
        raise DataError("\n".join(faults))
    if not any(characters):
        raise documents.no_text(", ".join(map(str, inputs)), notes)
    documents.require_all(notes, strict)
    sample = [piece for one in measured for piece in one.sample]
    digests = [one.digest for one in measured]
    return MeasuredText(files, digests, characters, sample, notes, how)


def prepare_text(
    measured: MeasuredText,
    out_dir: Path,
    tokenizer: str,
    val_fraction: float,
    workers: int,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Tokenise measured text into out_dir; its last val_fraction of characters is validation."""
    files, digests, *_, notes, how = measured
    characters = measured.characters
    documents.report(notes, tokenizer)
    lost = measured.lost_samples(tokenizer)
    if lost:
        print_line(
            f"note: {lost:,} of {len(measured.sample):,} samples of the text come back changed "
            "from the tokenizer's tokens: it has none for some characters"
        )
    todo = (
        f"its own tokens are longer: `{command_line('tokenizer')} FILES --out tok`, then "
        "--tokenizer tok, or --data.tokenizer tok of train own"
    )
    if tokenizer == "gpt2":
        each = bytes_per_token(get_tokenizer(tokenizer), measured.sample)
        if each < FEW_BYTES:
            print_line(f"note: GPT-2's tokens have {each:.2f} bytes on this text; {todo}")
    if tokenizer == "bytes":
        each = measured.count_tokens(tokenizer) / max(1, characters)
        if each > MANY_BYTES:
            print_line(f"note: a character of this text has {each:.2f} bytes, each a token; {todo}")
    validated = _validated(measured, val_fraction)
    if 0 < len(validated) < len(files):
        print_line(
            f"note: validation is the end of all text together: {len(validated):,} of "
            f"{len(files):,} files, from {validated[0]} on; its loss judges no other file: "
            "give last what it shall judge"
        )
    rows = [
        {"file": name, "sha256": digest} for (_, name), digest in zip(files, digests, strict=True)
    ]
    recipe = dict(
        tokenizer=tokenizer, val_fraction=val_fraction, shard_tokens=shard_tokens, source=rows
    )
    recipe |= how._asdict()
    special = documents.special_tokens(notes, tokenizer)
    if special.keys() - {END_OF_TEXT}:
        recipe |= {"special": special}

    return prepare_texts(measured.texts, characters, recipe, out_dir, _processes(files, workers))


def bytes_per_token(tokenizer: Tokenizer, parts: list[str]) -> float:
    """Return the bytes of UTF-8 for each token of a text in parts."""
    tokens = sum(len(tokenizer.encode(part)) for part in parts)
    return sum(len(part.encode(errors="replace")) for part in parts) / max(tokens, 1)


def _validated(measured: MeasuredText, val_fraction: float) -> list[str]:
    """Return the names of the files of which validation has text."""
    cut = _cut(measured.characters, val_fraction)
    sizes = measured.sizes
    ends = itertools.accumulate(sizes)
    rows = zip(measured.files, sizes, ends, strict=True)
    return [file.name for file, size, end in rows if size and end > cut]


def _cut(size: int, val_fraction: float) -> int:
    """Return how many characters of a text are training data."""
    return int(size * (1 - val_fraction))


def _processes(files: list[File], workers: int) -> int:
    """Return the number of processes that have work."""
    return min(workers, sum(path.stat().st_size for path, _ in files) // build.BATCH_CHARS)


def prepare_texts(
    texts: Callable[[], Iterable[Text]],
    size: int,
    recipe: dict[str, Any],
    out_dir: Path,
    workers: int,
) -> Path:
    """Tokenise the texts that `texts` returns, `size` characters in all, into out_dir."""
    cut = _cut(size, recipe["val_fraction"])
    if not 0 < cut < size:
        raise DataError(
            f"val_fraction: an empty split: {recipe['val_fraction']} of {size:,} characters; "
            "choose one between 0 and 1, or give more text"
        )
    # tokens, so that no disk with room is refused
    fewest = size if recipe["tokenizer"] == "bytes" else size // 5
    source = _Texts(texts, size, cut, recipe["shard_tokens"])
    build.build(source, recipe, out_dir, fewest, workers)
    return out_dir


class _Texts:
    """Texts as a Source: training data are the first `cut` characters; a state is the
    characters before a batch.
    """

    name = "text"
    unit = "characters"

    def __init__(self, texts: Callable[[], Iterable[Text]], size: int, cut: int, shard_tokens: int):
        self.size: int | None = size
        self._texts = texts
        self._cut = cut
        self._shard_tokens = shard_tokens

    def next_shard(self, split: str, shards: ShardRecords) -> tuple[str, int]:
        return build.numbered(split, shards), self._shard_tokens

    def batches(self, state: int | None) -> Iterator[Batch]:
        """Yield batches from `state` on; the text before it is read and dropped."""
        found = False
        characters = 0
        documents_of = split_documents(self._texts(), self._cut)
        for split, parts in itertools.groupby(documents_of, key=itemgetter(0)):
            for pieces in _batches((key, text) for _, key, text in parts):
                batch = Batch(split, characters, pieces)
                found |= characters == (state or 0)
                if found:
                    yield batch
                characters += batch.characters
        if not found or characters != self.size:
            raise DataError(
                f"text: it changed meanwhile: it has {characters:,} characters, "
                f"{self.size:,} when it was measured; remove what was prepared and start again"
            )


def split_documents(texts: Iterable[Text], cut: int) -> Iterator[tuple[str, Any, str]]:
    """Yield (split, key, text): the first `cut` characters of the documents
    for train, the rest for val.

    The cut is never inside a special token's name.
    """
    for key, text in texts:
        if 0 < cut < len(text):
            names = documents.MARKUP.finditer(text)
            cut = next((name.end() for name in names if name.start() < cut < name.end()), cut)
        if text[:cut]:
            yield "train", key, text[:cut]
        if text[cut:]:
            yield "val", key, text[cut:]
        cut = max(0, cut - len(text))


def _batches(texts: Iterable[Text]) -> Iterator[list[Piece]]:
    """Yield batches of at least BATCH_CHARS characters; the delimiter precedes later documents."""
    batch: list[Piece] = []
    size = 0
    for number, (_, parts) in enumerate(itertools.groupby(texts, key=itemgetter(0))):
        document = (text for _, text in parts)
        pieces = documents.split_at_whitespace(document, build.BATCH_CHARS)
        for i, piece in enumerate(pieces):
            batch.append(Piece(piece, follows=number > 0 and i == 0, rest=i > 0))
            size += len(piece)
            if size >= build.BATCH_CHARS:
                yield batch
                batch = []
                size = 0
    if batch:
        yield batch
