"""Know the tokenizer in Hugging Face's files, and write these files.

tokenizer.json is whole: programs on the tokenizers library and newer versions of transformers read
it alone.  Older ones read vocab.json and merges.txt.  All are derived from the bytes of each token.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpt2_triton.checkpoint.source_files import has_tokenizer, read_if_there
from gpt2_triton.checkpoint.weights import tokenizer_of
from gpt2_triton.config.rules import TOKENIZER_SIZES
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.data import tokenizer_file
from gpt2_triton.data.tokenizer import (
    LLAMA3_PATTERN,
    Tokenizer,
    get_tokenizer,
    has_file,
    has_llama3,
)
from gpt2_triton.data.tokenizer_file import END_OF_TEXT, FILE, FileTokenizer, byte_spelling

# a token of the vocabulary; llama3's is compared whole
KNOWN_BY = {"gpt2": ("Ġthe", 262), "bytes": ("ÿ", 255)}
SPELLING = byte_spelling()
STEPS = ("pre_tokenizer", "post_processor", "decoder")  # of tokenizer.json


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as transformers does: indented, in UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_in(directory: Path, model: ModelConfig) -> str | None:
    """Return the name of the tokenizer in a model's directory, which may lack its files: the
    directory itself, unless the tokens are known; None for a kind of file that is not read.
    """
    vocabulary = _vocabulary(directory)
    known = [name for name, (token, number) in KNOWN_BY.items() if vocabulary.get(token) == number]
    if has_llama3(directory):
        known = ["llama3"]
    elif not has_tokenizer(directory):
        return tokenizer_of(model)
    added = read_if_there(directory / FILE).get("added_tokens", [])
    most = max((token["id"] for token in added), default=0)
    name = next((name for name in known if most < TOKENIZER_SIZES[name] <= model.vocab_size), None)
    if name or not has_file(directory):
        return name
    there = str(directory)
    return there if get_tokenizer(there).vocab_size <= model.vocab_size else None


def _vocabulary(directory: Path) -> dict[str, int]:
    """Return the number of each token in a model's files, {} where they have another kind."""
    whole = read_if_there(directory / "tokenizer.json").get("model", {}).get("vocab")
    found = whole or read_if_there(directory / "vocab.json")
    return found if isinstance(found, dict) else {}  # sentencepiece's is a list


def write(directory: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """Write a tokenizer's files for transformers; block_size is its longest text in tokens."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer_file.copy(tokenizer, directory)
    tokens = tokenizer.token_bytes()
    special = {tokenizer.eot: END_OF_TEXT}
    if tokenizer.name == "llama3":
        special = {i: tokens[i].decode() for i in range(tokenizer.delimiter, len(tokens))}
    begin = special[tokenizer.delimiter]
    end = special[tokenizer.eot]
    about: dict[str, Any] = {"model_max_length": block_size, "bos_token": begin, "eos_token": end}
    if tokenizer.name == "llama3":
        steps = _llama3_steps(tokenizer.delimiter, begin)
        model = _llama3_model(tokens[: tokenizer.delimiter])
        about |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        }
    else:
        steps = dict.fromkeys(STEPS, _bytes_level())
        model = _gpt2_model(tokens, special)
        about |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "unk_token": end}
        write_json(directory / "vocab.json", model["vocab"])
        lines = "\n".join(["#version: 0.2", *model["merges"]])
        (directory / "merges.txt").write_text(f"{lines}\n", encoding="utf-8")
    exact = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": text, "special": True} | exact for i, text in special.items()]
    whole: dict[str, Any] = {"version": "1.0", "added_tokens": added}
    whole |= dict.fromkeys(("truncation", "padding", "normalizer"))
    write_json(directory / "tokenizer.json", whole | steps | {"model": model})
    write_json(directory / "tokenizer_config.json", about)


def _spell(token: bytes) -> str:
    return "".join(SPELLING[b] for b in token)


def _gpt2_model(tokens: list[bytes], special: dict[int, str]) -> dict[str, Any]:
    """Return tokenizer.json's model: all tokens, also of bytes, whose byte 0 is spelt as Ā is."""
    vocabulary = {special.get(i) or _spell(token): i for i, token in enumerate(tokens)}
    ordinary = [token for i, token in enumerate(tokens) if i not in special]
    return _model(vocabulary, merges(ordinary), ignore_merges=False)


def _llama3_model(ordinary: list[bytes]) -> dict[str, Any]:
    """Return tokenizer.json's model: the tokens before the special ones."""
    vocabulary = {_spell(token): i for i, token in enumerate(ordinary)}
    return _model(vocabulary, every_merge(ordinary), ignore_merges=True)


def _model(
    vocabulary: dict[str, int], parts: Iterable[Iterable[bytes]], ignore_merges: bool
) -> dict[str, Any]:
    pairs = [" ".join(map(_spell, pair)) for pair in parts]
    return {"type": "BPE", "ignore_merges": ignore_merges, "vocab": vocabulary, "merges": pairs}


def _bytes_level(splits: bool = True) -> dict[str, Any]:
    """Return a step of tokenizer.json: bytes in GPT-2's spelling, with its pattern if it splits."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": splits,
    }


def _llama3_steps(number: int, begin: str) -> dict[str, Any]:
    """Return the steps of tokenizer.json: Llama 3's pattern, and `begin` before a text."""
    pattern = {
        "type": "Split",
        "pattern": {"Regex": LLAMA3_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    text = [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {
        "type": "TemplateProcessing",
        "single": text,
        "pair": [*text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }
    splits = {"type": "Sequence", "pretokenizers": [pattern, _bytes_level(splits=False)]}
    return dict(zip(STEPS, (splits, template, _bytes_level()), strict=True))


def merges(tokens: list[bytes]) -> Iterator[list[bytes]]:
    """Yield the two parts from which each token of several bytes was merged; `tokens`
    are in the order of merges.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    for token in tokens:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pairs = [
                rank.get(left + right, len(tokens)) for left, right in itertools.pairwise(parts)
            ]
            first = pairs.index(min(pairs))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            yield parts


def every_merge(tokens: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs of tokens that make a token, as transformers does: Llama 3's
    were not all made by merges.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    for token in tokens:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = (cut for cut in cuts if rank.keys() >= {*cut})
        yield from sorted(known, key=lambda cut: [rank[part] for part in cut])
