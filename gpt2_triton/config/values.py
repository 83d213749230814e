"""Values of keys that have a form of their own: sizes of models, recompute levels, what fp8 leaves in bf16.

A ValueError of these functions becomes the message about the key, in schema.py or in rules.py.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

# llm.c's descriptors: layers, channels, heads, longest sequence.  GPT-3's are dense here, as in llm.c.
_GPT2 = {
    6: (384, 6), 12: (768, 12), 24: (1024, 16), 36: (1280, 20), 48: (1600, 25), 60: (1920, 30), 72: (2880, 30),
    84: (3456, 36),
}  # fmt: skip
_GPT3 = {
    384: (6, 6), 768: (12, 12), 1024: (24, 16), 1536: (24, 16), 2048: (24, 16), 2560: (32, 32), 4096: (32, 32),
    12288: (96, 96),
}  # fmt: skip
SIZES = {f"d{layers}": (layers, width, heads, 1024) for layers, (width, heads) in _GPT2.items()}
SIZES |= {f"gpt3:c{width}": (layers, width, heads, 2048) for width, (layers, heads) in _GPT3.items()}
SIZE_KEYS = ("n_layer", "n_embd", "n_head", "block_size")

RECOMPUTE_LEVELS = ("none", "gelu", "gelu+ln", "gelu+ln+qkv", "block")  # each keeps less than the one before


def check_recompute(value: str) -> str:
    """Return the value; ValueError unless it is `auto`, a level, or a level but the first with a number of layers."""
    level, colon, layers = value.partition(":")
    some = level in RECOMPUTE_LEVELS[1:] and layers.isdecimal() and len(layers) < 10 and int(layers) > 0
    if value == "auto" or value in RECOMPUTE_LEVELS or colon and some:
        return value
    raise ValueError(
        f"must be auto, {', '.join(RECOMPUTE_LEVELS[:-1])} or {RECOMPUTE_LEVELS[-1]}, "
        f"or {RECOMPUTE_LEVELS[2]}:4 for 4 layers"
    )


OPERATIONS = ("qkv", "attproj", "mlp")  # of a layer, whose products can be in fp8; mlp is fc and fcproj
KEPT_WORD = re.compile(rf"({'|'.join(OPERATIONS)})(?::(-?\d+))?|(-?\d+)")
HEAD = "head"  # the product of the output head, which gives the logits; its gradients are in bf16 always


def kept_in_bf16(value: str, n_layer: int) -> set[tuple[str, int]]:
    """Return the (operation, layer) pairs of fp8.keep_bf16; ValueError for a word that is none of its forms.  The head
    counts as an operation of the last layer.
    """
    pairs: set[tuple[str, int]] = set()
    for word in re.split(r"\s*,\s*|\s+", value.strip()) if value.strip() not in ("", "none") else []:
        if word == HEAD:
            pairs.add((HEAD, n_layer - 1))
            continue
        match = KEPT_WORD.fullmatch(word)
        if not match:
            names = ", ".join((HEAD, *OPERATIONS))
            raise ValueError(f"{word or repr(value)}: expected {names}, a layer, both as in attproj:0, or none")
        operation, layer = match[1] or "", match[2] or match[3]
        if layer and not -n_layer <= int(layer) < n_layer:
            raise ValueError(
                f"{word}: there are {n_layer} layers, 0 to {n_layer - 1}, or -{n_layer} to -1 from the end"
            )
        layers = [int(layer) % n_layer] if layer else range(n_layer)
        pairs |= {(op, l) for op in ([operation] if operation else OPERATIONS) for l in layers}
    return pairs


def operations_in_fp8(precision: str, keep_bf16: str, n_layer: int) -> list[frozenset[str]]:
    """Return the operations of each layer whose operands are in fp8; the head's is with those of the last layer."""
    if precision == "bf16":
        return [frozenset()] * n_layer
    in_fp8 = {(op, l) for op in OPERATIONS for l in range(n_layer)} | {(HEAD, n_layer - 1)}
    in_fp8 -= kept_in_bf16(keep_bf16, n_layer)
    return [frozenset(op for op, layer in in_fp8 if layer == l) for l in range(n_layer)]


def closest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean NAME?" with the known names that end as a dotted `name` does or are spelled like it, or
    nothing.
    """
    known, last = list(known), name.rpartition(".")[2]
    near = [one for one in known if one.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {' or '.join(prefix + one for one in near)}?" if near else ""


def join_words(value: Any) -> Any:
    """Return a whole number, or a list of words and numbers, as YAML has them, as one text with commas; any other value
    as it is.  ValueError for null.
    """
    if value is None:
        raise ValueError('must be words or a list of them, "" for none of them')
    words = value if isinstance(value, list) else [value]
    return ",".join(map(str, words)) if all(type(word) in (str, int) for word in words) else value
