"""Read and write the tokenizer in Hugging Face's files.

tokenizer.json is whole: programs on the tokenizers library and newer versions of transformers read it alone.  Older
ones read vocab.json and merges.txt.  All are derived from the bytes of each token.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_triton.data.tokenizer import END_OF_TEXT, Tokenizer, byte_spelling
from gpt2_triton.errors import CheckpointError

GPT2_THE = ("Ġthe", 262)  # a token of GPT-2's, by which its tokenizer is known
KEPT = ("pad_token", "chat_template")  # of tokenizer_config.json


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; CheckpointError if there is another thing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); expected a JSON object") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object to a file, as UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def is_gpt2(directory: Path) -> bool:
    """Return whether the tokenizer in `directory` is GPT-2's; True if there is none."""
    vocabulary = _read_if_there(directory / "tokenizer.json").get("model", {}).get("vocab")
    vocabulary = vocabulary or _read_if_there(directory / "vocab.json")
    token, number = GPT2_THE
    return not vocabulary or (token in vocabulary and vocabulary[token] == number)


def _added_tokens(directory: Path) -> list[dict[str, Any]]:
    """Return the tokens that were added to the tokenizer in `directory`, as in tokenizer.json."""
    if whole := _read_if_there(directory / "tokenizer.json"):
        return whole.get("added_tokens", [])
    return [_special(number, text) for text, number in _read_if_there(directory / "added_tokens.json").items()]


def _special(number: int, text: str) -> dict[str, Any]:
    matching = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True} | matching


def write(directory: Path, tokenizer: Tokenizer, block_size: int, rows: int, beside: Path | None) -> int:
    """Write a tokenizer's files, with the tokens added in `beside`; return how many of `rows` tokens have a text."""
    tokens, spelling = tokenizer.token_bytes(), byte_spelling()

    def spell(token: bytes) -> str:
        return "".join(spelling[b] for b in token)

    ordinary = [token for i, token in enumerate(tokens) if i != tokenizer.eot]
    pairs = [f"{spell(left)} {spell(right)}" for left, right in merges(ordinary)]
    # for bytes too, since the spelling of byte 0 is Ā, a letter that texts may have
    vocabulary = {END_OF_TEXT if i == tokenizer.eot else spell(token): i for i, token in enumerate(tokens)}
    added = [] if beside is None else [t for t in _added_tokens(beside) if len(tokens) <= t["id"] < rows]
    theirs = {} if beside is None else _read_if_there(beside / "tokenizer_config.json")
    write_json(directory / "vocab.json", vocabulary)
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n", encoding="utf-8")
    write_json(directory / "tokenizer.json", _whole(vocabulary, pairs, [_special(tokenizer.eot, END_OF_TEXT), *added]))
    ours = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": block_size}
    ours |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    write_json(directory / "tokenizer_config.json", ours | {key: theirs[key] for key in KEPT if key in theirs})
    return len(tokens) + len(added)


def _whole(vocabulary: dict[str, int], pairs: list[str], added: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of tokenizer.json: byte-pair encoding in GPT-2's spelling of bytes."""
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    steps = {"pre_tokenizer": bytes_level, "post_processor": bytes_level, "decoder": bytes_level}
    absent = dict.fromkeys(("truncation", "padding", "normalizer"))
    model = {"type": "BPE", "vocab": vocabulary, "merges": pairs}
    return {"version": "1.0", "added_tokens": added} | absent | steps | {"model": model}


def merges(tokens: list[bytes]) -> Iterator[list[bytes]]:
    """Yield the two parts from which byte-pair encoding merged each token of several bytes.

    `tokens` are in the order of the merges; the parts of a token are its bytes after all earlier merges.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    for token in tokens:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pairs = [rank.get(left + right, len(tokens)) for left, right in itertools.pairwise(parts)]
            first = pairs.index(min(pairs))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            yield parts
