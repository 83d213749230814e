"""Local files as documents.

A .jsonl, .json or .parquet has a document in each row; any other file is a document, or several
between `<|endoftext|>`.  Memory grows with the longest line, not with the file.  What is left out
is counted in `Notes`.
"""

import glob
import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton.console import print_line
from gpt2_triton.data.prepare import contents
from gpt2_triton.data.prepare.build import PROGRESS
from gpt2_triton.data.shards import RECORD
from gpt2_triton.data.text_names import COMPRESSIONS, TEXT_KINDS, is_text
from gpt2_triton.data.tokenizer import get_tokenizer, label, special_names
from gpt2_triton.data.tokenizer_file import CONFIG, END_OF_TEXT, FILE, HALF
from gpt2_triton.errors import DataError
from gpt2_triton.files import expand_glob, object_in, sha256

MOST_ROWS_WITHOUT_TEXT = 10_000  # at the start of a source, which then has another field
TOKENIZER = {FILE, CONFIG}
ENDINGS = (
    f"names that end in {', '.join(TEXT_KINDS)} (also with {', '.join(COMPRESSIONS)}) or .parquet"
)
ROWS = (".jsonl", ".json", ".parquet")
BEGIN = 8192  # bytes in which a file that is no text has a NUL
OURS = {RECORD, PROGRESS, "metrics.jsonl", "run.json", "stats.jsonl", *TOKENIZER}  # _is_written
PIECE = 4096  # characters of a sample that follow each other
SAFE_CUT = re.compile(r"(?<=\S)[ \t]|(?<=[^\W_])[\r\n]")
# what special tokens look like: Llama 3's and GPT-2's, then names of other tokenizers
MARKUP = re.compile(r"<\|\w+\|>|<｜[^<>｜]{1,40}｜>|</?s>|<(?:unk|pad|bos|eos|mask)>|<\w+_of_turn>")

Notes = dict[str, list[Any]]  # {what: [count, first place]}, for JSON


class Reading(NamedTuple):
    """How to find documents in files and rows."""

    field: str = "text"  # of a row; a.b is the field b of the field a
    # END_OF_TEXT ends a document, and special tokens are these tokens; otherwise ordinary text
    endoftext: bool = True


AS_DOCUMENTS = Reading()


class File(NamedTuple):
    """A file of text, and its name in the record."""

    path: Path
    name: str  # in the record: the file's name, or its path below the folder that was given


# ---- what was left out ----


def note(notes: Notes, what: str, where: object, count: int = 1) -> None:
    """Count `what`, and keep its first place."""
    notes.setdefault(what, [0, str(where)])[0] += count


def left_out(notes: Notes) -> str:
    """Return what was left out, for a message; "" for nothing."""
    return "; ".join(
        f"{what}: {count:,}, first {where}"
        for what, (count, where) in notes.items()
        if not MARKUP.fullmatch(what)
    )


def markup(notes: Notes) -> dict[str, int]:
    """Return how often the text has each name that looks like a special token."""
    return {what: count for what, (count, _) in sorted(notes.items()) if MARKUP.fullmatch(what)}


def special_tokens(notes: Notes, tokenizer: str) -> dict[str, int]:
    """Return how often the text has each special token of a tokenizer, END_OF_TEXT among them."""
    known = special_names(get_tokenizer(tokenizer))
    return {what: count for what, count in markup(notes).items() if what in known}


def report(notes: Notes, tokenizer: str) -> None:
    """Print which special tokens were found, what only looks like some, and what was left out."""
    special = special_tokens(notes, tokenizer)
    ordinary = {
        what: count
        for what, count in markup(notes).items()
        if what not in special and what.endswith(("|>", "｜>"))
    }
    for title, found in (
        ("special tokens", special),
        (f"ordinary text, no special tokens of {label(tokenizer)}", ordinary),
    ):
        if found:
            listed = ", ".join(f"{what} {count:,}" for what, count in found.items())
            print_line(f"{title}: {textwrap.shorten(listed, 300, placeholder=' ...')}")
    report_left_out(notes)


def report_left_out(notes: Notes) -> None:
    """Print what was left out, if anything was."""
    what = left_out(notes)
    if what:
        print_line(f"left out: {what}")


def require_all(notes: Notes, strict: bool) -> None:
    """DataError if anything was left out and `strict` forbids it."""
    what = left_out(notes)
    if strict and what:
        raise DataError(f"--strict: would leave out {what}; correct it, or give no --strict")


def no_text(where: object, notes: Notes) -> DataError:
    """Return the error about files without text."""
    what = left_out(notes) or "nothing"
    field = 'name its field, as --field NAME, or write {"text": "..."} rows'
    return DataError(
        f"{where}: no text, but {what}; "
        f"{field if 'rows without' in what else 'give files with text'}"
    )


# ---- which files ----


def find_files(inputs: Sequence[Path]) -> tuple[list[File], Notes]:
    """Return the files as given, each once, and notes; the files of a folder or a glob are sorted.

    A file of another kind is text if it is given itself, or by a glob with its ending.
    DataError if an input is missing or has no text, OSError if one cannot be read.
    """
    files: dict[Path, File] = {}
    notes: Notes = {}
    others = []
    plain = []
    for given in inputs:
        texts = 0
        found = _matches(given)
        for file in found:
            by_name = is_text(file.path)
            if not (file.path.is_file() and (by_name or _is_plain(file.path, given))):
                others.append(file.path)
                continue
            if not by_name:
                plain.append(file.path)
            texts += 1
            first = files.setdefault(file.path.resolve(), file)
            if first is not file:
                note(notes, "files given twice", file.path)
        if not texts:
            what = "no text" if found or given.exists() else "no such file"
            raise DataError(
                f"{given}: {what}; give a file, a folder or a quoted glob; text has {ENDINGS}; "
                'other text goes by its ending, as "code/**/*.py"'
            )
    if plain:
        print_line(f"read as plain text: {_kinds(plain)}: {len(plain):,}, first {plain[0]}")
    if others:
        what = f"files of other kinds ({_kinds(others)}), not given by their ending"
        note(notes, what, others[0], len(others))
    return [*files.values()], notes


def _kinds(paths: Sequence[Path]) -> str:
    """Return the endings of files, for a message."""
    endings = sorted({path.suffix or "no ending" for path in paths})
    return textwrap.shorten(", ".join(endings), 100)


def _is_plain(path: Path, given: Path) -> bool:
    """Return whether an input names this file or its ending, and it has no NUL at its begin."""
    if path != given and path.suffix != (given.suffix or None):
        return False
    with open(path, "rb") as file:
        return b"\0" not in file.read(BEGIN)


def _matches(given: Path) -> list[File]:
    """Return the files of a folder or a glob, or the file itself, of any kind."""
    if given.is_dir():
        return [File(path, str(path.relative_to(given))) for path in sorted(_walk(given))]
    if glob.has_magic(str(given)) and not given.exists():
        return [file for path in expand_glob(str(given)) for file in _matches(Path(path))]
    return [File(given, given.name)] if given.exists() else []


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, also through links; no hidden ones, shards, runs, models."""

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        ours = _is_written(root, {*names})
        real = os.path.realpath(root)
        if real in seen or (ours and root != str(folder)):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith(".") and not (ours and name in OURS):
                yield Path(root, name)


def _is_written(folder: str, names: set[str]) -> bool:
    """Return whether a folder is a run, a checkpoint, a model or shards; texts may have one of
    the names.
    """
    sets = (
        {"metrics.jsonl", "config.yaml"},
        {"manifest.json", "state.json"},
        {"config.json", "generation_config.json"},
        TOKENIZER,
    )
    return any(known <= names for known in sets) or any(
        "shards" in object_in(Path(folder, name)) for name in {RECORD, PROGRESS} & names
    )


# ---- what is in them ----


class Measured(NamedTuple):
    """What a file holds."""

    digest: str  # sha256
    characters: int  # of its documents
    sample: list[str]  # of their text, to estimate its tokens
    notes: Notes
    faults: list[str]  # why it cannot be read, if it cannot


def measure(place: tuple[Path, int], how: Reading, step: int) -> Measured:
    """Measure the file at (path, bytes of the files before it); sample PIECE
    characters of each `step`.
    """
    path, before = place
    characters = 0
    sample: list[str] = []
    notes: Notes = {}
    try:
        for _, text in read(path, how, notes):  # first: it has the messages
            sample += _thinned(text, before + characters, step)
            characters += len(text)
        return Measured(sha256(path), characters, sample, notes, [])
    except DataError as error:
        return Measured("", 0, [], notes, [str(error)])


def _thinned(text: str, at: int, step: int) -> list[str]:
    """Return the parts of a text, which begins at `at`, in the first PIECE characters of a step."""
    starts = range(-(at % step), len(text), step)
    return [text[max(0, start) : start + PIECE] for start in starts if start + PIECE > 0]


def read(path: Path, how: Reading, notes: Notes) -> Iterator[tuple[int, str]]:
    """Yield (document, text) in order: a long document in several
    parts, an empty one not at all.
    """
    where = ""
    document = 0
    ending = contents.ending_of(path)
    if ending not in ROWS:
        texts = contents.parts(path)
    else:
        is_parquet = ending == ".parquet"
        if is_parquet:
            rows = contents.parquet_rows(path, how.field)
        else:
            rows = contents.json_rows(path, ending == ".json")
        texts = texts_of_rows(rows, how.field, notes)
    try:
        contents.refuse_pointer(path)
        for where, begins, text in texts:
            for i, part in enumerate(clean(where, text, how, notes)):
                document += begins or i > 0
                if part:
                    yield document, part
    except contents.UNREADABLE as error:
        raise contents.unreadable(f"after {where}" if where else path, error) from None
    if not where:
        note(notes, "empty files", path)


def clean(where: str, text: str, how: Reading, notes: Notes) -> list[str]:
    r"""Return the documents of a text, with \n for \r\n, and without NUL, the
    end-of-text token of bytes.
    """
    text = text.replace("\r\n", "\n")
    nuls = text.count("\0")
    if nuls:
        note(notes, "NUL characters", where, nuls)
        text = text.replace("\0", "")
    if not how.endoftext:
        return [text]
    for what in MARKUP.findall(text):
        note(notes, what, where)
    return text.split(END_OF_TEXT)


def texts_of_rows(
    rows: Iterable[tuple[str, Any]], field: str, notes: Notes
) -> Iterator[tuple[str, bool, str]]:
    """Yield (place, True, text) of each (place, row), and (place, False, "") of a row without text.

    A row is an object with the field, or a text.  DataError if the first
    MOST_ROWS_WITHOUT_TEXT rows have no text.
    """
    what = f"rows without text in the field {field}"
    found = False
    for number, (where, row) in enumerate(rows, 1):
        text = _text_of(row, field)
        if isinstance(text, str) and text:
            found = True
            halves = HALF.findall(text)
            if halves:
                note(notes, "half characters", where, len(halves))
                text = HALF.sub("", text)
        else:
            text = ""
            if what in notes:
                got = ""
            else:
                got = textwrap.shorten(json.dumps(row, default=str), 100, placeholder=" ...")
            note(notes, what, f"{where}: {got}")
            if number == MOST_ROWS_WITHOUT_TEXT and not found:
                raise no_text(where, notes)
        yield where, bool(text), text


def _text_of(row: Any, field: str) -> Any:
    """Return the field of a row; a row that is a text has no fields."""
    if isinstance(row, str):
        return row
    if isinstance(row, dict) and field in row:
        return row[field]
    for key in field.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


# ---- pieces to tokenise ----


def split_at_whitespace(parts: Iterable[str], size: int) -> Iterator[str]:
    """Split a document, given in parts, into pieces of at least `size`
    characters, the last one shorter.

    The pieces have the tokens of the whole: no token lies across a cut, unless a tokenizer's file
    has a token of several words.  After other characters, GPT-2's pattern matches no whitespace.
    Llama 3's matches line ends, but not after a letter or a digit.
    """
    rest = ""
    for part in parts:
        rest += part
        start = 0
        while found := SAFE_CUT.search(rest, start + size):
            yield rest[start : found.start()]
            start = found.start()
        rest = rest[start:]
    if rest:
        yield rest
