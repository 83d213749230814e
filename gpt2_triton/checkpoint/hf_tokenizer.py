"""Know the tokenizer in Hugging Face's files, and write these files.

tokenizer.json is whole: programs on the tokenizers library and newer versions of transformers read
it alone.  Older ones read vocab.json and merges.txt.  All are derived from the bytes of each token.
"""

import itertools
import json
from collections.abc import Iterator
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
    whole = read_if_there(directory / "tokenizer.json").get("model", {}).get("vocab")
    found = whole or read_if_there(directory / "vocab.json")
    return found if isinstance(found, dict) else {}  # sentencepiece's is a list


def _special(number: int, text: str) -> dict[str, Any]:
    matching = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True} | matching


def write(directory: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """Write a tokenizer's files for transformers; block_size is its longest text in tokens."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer_file.copy(tokenizer, directory)
    tokens, spelling, llama = tokenizer.token_bytes(), byte_spelling(), tokenizer.name == "llama3"
    special = {tokenizer.eot: END_OF_TEXT}
    if llama:
        special = {i: tokens[i].decode() for i in range(tokenizer.delimiter, len(tokens))}

    def spell(token: bytes) -> str:
        return "".join(spelling[b] for b in token)

    ordinary = [token for i, token in enumerate(tokens) if i not in special]
    parts = every_merge(ordinary) if llama else merges(ordinary)
    pairs = [f"{spell(left)} {spell(right)}" for left, right in parts]
    # for bytes too, since the spelling of byte 0 is Ā, a letter that texts may have
    vocabulary = {
        special.get(i) or spell(token): i for i, token in enumerate(ordinary if llama else tokens)
    }
    begin, end = special[tokenizer.delimiter], special[tokenizer.eot]
    ours: dict[str, Any] = {"model_max_length": block_size, "bos_token": begin, "eos_token": end}
    if llama:
        ours |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        }
        steps = _llama3_steps(tokenizer.delimiter, begin)
    else:
        ours |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "unk_token": end}
        steps = dict.fromkeys(STEPS, _bytes_level())
        write_json(directory / "vocab.json", vocabulary)
        (directory / "merges.txt").write_text(
            "\n".join(["#version: 0.2", *pairs]) + "\n", encoding="utf-8"
        )
    whole: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [*itertools.starmap(_special, special.items())],
    }
    whole |= dict.fromkeys(("truncation", "padding", "normalizer")) | steps
    whole["model"] = {"type": "BPE", "ignore_merges": llama, "vocab": vocabulary, "merges": pairs}
    write_json(directory / "tokenizer.json", whole)
    write_json(directory / "tokenizer_config.json", ours)


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
    two, ids = (
        [*text, {"Sequence": {"id": "B", "type_id": 1}}],
        {"id": begin, "ids": [number], "tokens": [begin]},
    )
    template = {
        "type": "TemplateProcessing",
        "single": text,
        "pair": two,
        "special_tokens": {begin: ids},
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
        yield from sorted(
            (cut for cut in cuts if rank.keys() >= {*cut}),
            key=lambda cut: [rank[part] for part in cut],
        )
