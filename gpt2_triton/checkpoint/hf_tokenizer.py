"""Know the tokenizer in Hugging Face's files, and write these files.

tokenizer.json is whole: programs on the tokenizers library and newer versions of transformers read
it alone.  Older ones read vocab.json and merges.txt.  All are derived from the bytes of each token.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from gpt2_triton.checkpoint.source_files import has_tokenizer
from gpt2_triton.checkpoint.weights import tokenizer_of
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.config.values import TOKENIZER_SIZES
from gpt2_triton.data import tokenizer_file
from gpt2_triton.data.tokenizer import (
    LLAMA3_PATTERN,
    Tokenizer,
    get_tokenizer,
    has_file,
    has_llama3,
)
from gpt2_triton.data.tokenizer_file import END_OF_TEXT, FILE, SPELLING, FileTokenizer
from gpt2_triton.files import object_in, write_json

# a token of the vocabulary; llama3's is compared whole
KNOWN_BY = {"gpt2": ("Ġthe", 262), "bytes": ("ÿ", 255)}
Pairs = list[tuple[str, str]]


def tokenizer_in(directory: Path, model: ModelConfig) -> str | None:
    """Return the name of the tokenizer in a model's directory, which may lack its files: the
    directory itself, unless the tokens are known; None for a kind of file that is not read.
    """
    if has_llama3(directory):
        known = ["llama3"]
    elif has_tokenizer(directory):
        numbers = _vocabulary(directory)
        known = [name for name, (token, number) in KNOWN_BY.items() if numbers.get(token) == number]
    else:
        return tokenizer_of(model)
    added = object_in(directory / FILE).get("added_tokens", [])
    most = max((token["id"] for token in added), default=0)
    for name in known:
        if most < TOKENIZER_SIZES[name] <= model.vocab_size:
            return name
    there = str(directory)
    is_own = has_file(directory) and get_tokenizer(there).vocab_size <= model.vocab_size
    return there if is_own else None


def _vocabulary(directory: Path) -> dict[str, int]:
    """Return the number of each token in a model's files, {} where they have another kind."""
    whole = object_in(directory / "tokenizer.json").get("model", {}).get("vocab")
    found = whole or object_in(directory / "vocab.json")
    return found if isinstance(found, dict) else {}  # sentencepiece's is a list


def write(directory: Path, tokenizer: Tokenizer, block_size: int) -> None:
    """Write a tokenizer's files for transformers; block_size is its longest text in tokens."""
    if isinstance(tokenizer, FileTokenizer):
        tokenizer_file.copy(tokenizer, directory)
        return
    assert tokenizer.eot is not None
    tokens = tokenizer.token_bytes()
    special = {tokenizer.eot: END_OF_TEXT}
    if tokenizer.name == "llama3":
        special = {i: tokens[i].decode() for i in range(tokenizer.delimiter, len(tokens))}
    begin = special[tokenizer.delimiter]
    end = special[tokenizer.eot]
    about: dict[str, Any] = {"model_max_length": block_size, "bos_token": begin, "eos_token": end}
    if tokenizer.name == "llama3":
        whole, pairs = _llama3(tokens[: tokenizer.delimiter], begin)
        about |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        }
    else:
        whole, pairs = _gpt2(tokens, special)
        about |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "unk_token": end}
        whole.model.save(str(directory))  # vocab.json and merges.txt
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([AddedToken(text, normalized=False) for text in special.values()])
    content = json.loads(whole.to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in pairs]  # as all versions read them
    write_json(directory / FILE, content)
    write_json(directory / tokenizer_file.CONFIG, about)


def _spell(token: bytes) -> str:
    return "".join(SPELLING[b] for b in token)


def _spelled(pair: Iterable[bytes]) -> tuple[str, str]:
    left, right = map(_spell, pair)
    return left, right


def _gpt2(tokens: list[bytes], special: dict[int, str]) -> tuple[tokenizers.Tokenizer, Pairs]:
    """Return GPT-2's tokenizer and its merges; byte 0 of the tokenizer bytes ends a text."""
    vocabulary = {special.get(i) or _spell(token): i for i, token in enumerate(tokens)}
    ordinary = [token for i, token in enumerate(tokens) if i not in special]
    pairs = [*map(_spelled, merges(ordinary))]
    whole = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.post_processor = processors.ByteLevel(trim_offsets=False)
    return whole, pairs


def _llama3(ordinary: list[bytes], begin: str) -> tuple[tokenizers.Tokenizer, Pairs]:
    """Return Llama 3's tokenizer, whose special tokens follow the ordinary ones, and its merges."""
    vocabulary = {_spell(token): i for i, token in enumerate(ordinary)}
    pairs = [*map(_spelled, every_merge(ordinary))]
    whole = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    pattern = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.pre_tokenizer = pre_tokenizers.Sequence([pattern, bytes_level])
    whole.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B:1", special_tokens=[(begin, len(ordinary))]
    )
    return whole, pairs


def merges(tokens: list[bytes]) -> Iterator[list[bytes]]:
    """Yield the two parts from which each token of several bytes was merged; `tokens`
    are in the order of merges.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    for token in tokens:
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            ranks = [
                rank.get(left + right, len(tokens)) for left, right in itertools.pairwise(parts)
            ]
            first = ranks.index(min(ranks))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            yield parts


def every_merge(tokens: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs of tokens that make a token, as transformers does: Llama 3's
    were not all made by merges.
    """
    rank = {token: i for i, token in enumerate(tokens)}
    for token in tokens:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [cut for cut in cuts if all(part in rank for part in cut)]
        yield from sorted(known, key=lambda cut: [rank[part] for part in cut])
