"""Tokenizers in Hugging Face's tokenizer.json, through the library `tokenizers`.

A name is the path of such a file or of its folder.  PATH#TOKEN also names the token that ends a
text.  Without it tokenizer_config.json beside the file names one, else special_tokens_map.json,
else the file has END_OF_TEXT.  Nothing is guessed.

The file may also be nanoGPT's meta.pkl, whose tokens are characters.  No token ends a text there.
"""

import functools
import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_triton.errors import DataError
from gpt2_triton.files import expand, object_in, write_json

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
NAMES_OF_TOKENS = (CONFIG, "special_tokens_map.json")  # files that may name the end of a text
PICKLE = ".pkl"  # ends the name of nanoGPT's meta.pkl
END_OF_TEXT = "<|endoftext|>"  # in a text: the end-of-text token, where people write one
HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which has no bytes
SPACE = "▁"  # in the tokens of sentencepiece
IDENTITY = "sha256:"  # begins the name of a tokenizer by its content
READ = ("normalizer", "pre_tokenizer")  # steps of the file that decide which tokens a text has
PRINTABLE = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
# the character of each byte in GPT-2's files, in the order of GPT-2's first 256 tokens
SPELLING = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}
BYTE_OF = {character: b for b, character in SPELLING.items()}


class FileTokenizer:
    """The tokenizer of one file; data/tokenizer.py's Tokenizer says what its members are."""

    def __init__(self, name: str):
        # threads would compete with the processes of `prepare`
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        self.name = name
        self.file, token = _parse(name)
        self.content = _read(self.file)
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(self.content))
        except Exception as error:  # the library raises Exception itself
            raise DataError(
                f"{self.file}: the library tokenizers refuses it: {error}; "
                "update the package tokenizers, or save it again by transformers' save_pretrained"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: id for id, token in added.items() if token.special}
        of_characters = all(len(text) == 1 for text in vocabulary)
        self._characters = {*vocabulary} if of_characters else set[str]()
        named = token or _named_end(self.file.parent)
        self.end = named or ("" if of_characters else END_OF_TEXT)
        if self.end and self.end not in vocabulary:
            raise DataError(
                f"{self.file}: no token {self.end}, which would end a text; "
                f"write {self.file}#TOKEN with the token that does"
            )
        self.eot = vocabulary.get(self.end)
        self.delimiter = vocabulary.get(self.end or "\n", 0)
        self.special: Mapping[str, int] = special | ({self.end: self.delimiter} if self.end else {})
        self.begin = self._begin()

    def _begin(self) -> int | None:
        """Return the special token that the file puts before every text; None without one."""
        first = self._tokenizer.encode("a").ids[:1]
        return first[0] if first and first[0] in self.special.values() else None

    @functools.cached_property
    def identity(self) -> str:
        """A hash of what decides the tokens of a text; the form of the file does not change it."""
        model = dict(self.content["model"])
        merges = model.get("merges") or []
        model["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        added = [[token["id"], token["content"]] for token in self.content.get("added_tokens", [])]
        parts = [model, sorted(added), *(self.content.get(step) for step in READ)]
        return IDENTITY + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        self._tokenizer.encode_special_tokens = not special
        whole = HALF.sub("?", text)
        lacking = {*whole} - self._characters if self._characters else None
        if lacking:
            listed = ", ".join(map(repr, sorted(lacking)))
            raise DataError(f"{self.file}: has no {listed}; leave them out")
        [found] = self._tokenizer.encode_batch_fast([whole], add_special_tokens=False)
        return np.array(found.ids, np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids if i < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def token_bytes(self) -> list[bytes]:
        steps = json.dumps(self.content.get("decoder"), ensure_ascii=False)
        if not ("ByteLevel" in steps or SPACE in steps or self._characters):
            raise DataError(f"{self.file}: its tokens have no bytes of their own")
        added = self._tokenizer.get_added_tokens_decoder()
        tokens = [self._tokenizer.id_to_token(i) or "" for i in range(self.vocab_size)]
        bytes_of = bytes_of_spelling if "ByteLevel" in steps else _bytes_of_sentencepiece
        return [token.encode() if i in added else bytes_of(token) for i, token in enumerate(tokens)]


def bytes_of_spelling(token: str) -> bytes:
    """Return the bytes of a token in GPT-2's spelling."""
    return bytes(BYTE_OF[character] for character in token)


def _bytes_of_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


# ---- the files ----


def _parse(name: str) -> tuple[Path, str]:
    """Return the file that a name means, and the token that it names as the end of a text."""
    path = Path(expand(name))
    token = ""
    if not path.exists() and "#" in name:
        where, _, token = name.rpartition("#")
        path = Path(expand(where))
    return (path / FILE if path.is_dir() else path), token


def is_there(name: str) -> bool:
    """Return whether the file of a name exists."""
    return _parse(name)[0].is_file()


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, numbers and texts; executes nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _of_nanogpt(file: Path, data: bytes) -> dict[str, Any]:
    """Return the content of a tokenizer.json for the characters of nanoGPT's meta.pkl."""
    try:
        characters = _PlainUnpickler(io.BytesIO(data)).load()["itos"]
        vocabulary = {characters[i]: i for i in range(len(characters))}
        if {*map(len, vocabulary)} != {1}:
            raise ValueError("not every token is one character")
    except Exception as error:  # a damaged pickle raises almost any
        raise DataError(f"{file}: no meta.pkl of nanoGPT: {error}; give another file") from None
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return {"model": model, "decoder": {"type": "Fuse"}, "added_tokens": []}


def _read(file: Path) -> dict[str, Any]:
    try:
        data = file.read_bytes()
        content = _of_nanogpt(file, data) if file.suffix == PICKLE else json.loads(data)
    except OSError as error:
        raise _unreadable(file, f"cannot read: {error.strerror}") from None
    except ValueError as error:
        raise _unreadable(file, f"not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise DataError(f"{file}: no {FILE} of Hugging Face: it has no model; give another file")
    return content


def _unreadable(file: Path, why: str) -> DataError:
    """Return the error about a file that is no tokenizer.json."""
    todo = f"give gpt2, llama3, bytes, or a {FILE} or its folder"
    if (file.parent / "tokenizer.model").is_file():
        folder = str(file.parent)
        save = f"AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
        todo = f"transformers makes a {FILE} of tokenizer.model: {save}"
    return DataError(f"tokenizer {file}: {why}; {todo}")


def _named_end(folder: Path) -> str:
    """Return the end of a text that the files beside a tokenizer name, "" for none."""
    for name in NAMES_OF_TOKENS:
        token = object_in(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    return ""


def stem(name: str) -> str:
    """Return the name of the folder of a tokenizer, or of its file unless that is FILE."""
    file = _parse(name)[0].absolute()
    return re.sub(r"[^\w-]+", "-", file.parent.name if file.name == FILE else file.stem)


def copy(tokenizer: FileTokenizer, folder: Path) -> None:
    """Copy a tokenizer into a folder, with a tokenizer_config.json that names its end of text."""
    if tokenizer.file.resolve() == (folder / FILE).resolve():
        return
    if tokenizer.file.suffix == PICKLE:
        write_json(folder / FILE, tokenizer.content)
    else:
        shutil.copyfile(tokenizer.file, folder / FILE)
    usual = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config = usual | object_in(tokenizer.file.parent / CONFIG)
    write_json(folder / CONFIG, config | {"eos_token": tokenizer.end or None})
