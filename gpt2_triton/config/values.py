"""Sizes of models, recompute levels, whole numbers, and suggestions for a mistyped name.

pydantic puts the text of a ValueError raised here into the message about the key.
"""

import difflib
import os
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

# llm.c's names of sizes: layers, channels, heads, longest sequence.  GPT-3's
# attention is dense, as in llm.c.
_GPT2 = {
    6: (384, 6), 12: (768, 12), 24: (1024, 16), 36: (1280, 20), 48: (1600, 25), 60: (1920, 30),
    72: (2880, 30), 84: (3456, 36),
}  # fmt: skip
_GPT3 = {
    384: (6, 6), 768: (12, 12), 1024: (24, 16), 1536: (24, 16), 2048: (24, 16), 2560: (32, 32),
    4096: (32, 32), 12288: (96, 96),
}  # fmt: skip
SIZES = {f"d{layers}": (layers, width, heads, 1024) for layers, (width, heads) in _GPT2.items()}
SIZES |= {
    f"gpt3:c{width}": (layers, width, heads, 2048) for width, (layers, heads) in _GPT3.items()
}
SIZES |= {
    "llama:c768": (12, 768, 12, 8192),
    "llama:1b": (16, 2048, 32, 1 << 17),
    "llama:3b": (28, 3072, 24, 1 << 17),
    "llama:8b": (32, 4096, 32, 1 << 17),
    "qwen3:0.6b": (28, 1024, 16, 1 << 15),
    "qwen3:1.7b": (28, 2048, 16, 1 << 15),
}
_META = {"arch": "llama", "n_kv_head": 8, "vocab_size": 128_256}
_QWEN3 = {
    "arch": "llama", "qk_norm": True, "n_kv_head": 8, "vocab_size": 151_936, "norm_eps": 1e-6,
    "rope_theta": 1e6,
}  # fmt: skip
# keys of a size beside SIZE_KEYS
LLAMA_KEYS: dict[str, dict[str, Any]] = {
    "llama:c768": {"arch": "llama", "n_kv_head": 4, "n_inner": 2048},
    "llama:1b": _META | {"n_inner": 8192, "rope_factor": 32.0},
    "llama:3b": _META | {"n_inner": 8192, "rope_factor": 32.0},
    "llama:8b": _META | {"n_inner": 14_336, "rope_factor": 8.0, "tied": False},
    "qwen3:0.6b": _QWEN3 | {"head_dim": 128, "n_inner": 3072},
    "qwen3:1.7b": _QWEN3 | {"n_inner": 6144},
}
SIZE_KEYS = ("n_layer", "n_embd", "n_head", "block_size")
# what a given size replaces in a file: all that any size says, but no vocabulary; a cap, since
# GPT-2 has none
OF_A_SIZE = {"size", "logit_cap", *SIZE_KEYS}.union(*LLAMA_KEYS.values()) - {"vocab_size"}

# tokens of each tokenizer with a name; others are files
TOKENIZER_SIZES = {"gpt2": 50257, "llama3": 128256, "bytes": 256}
# each level keeps less than the level before it
RECOMPUTE_LEVELS = ("none", "gelu", "gelu+ln", "gelu+ln+qkv", "block")


def keys_of_size(size: str) -> dict[str, Any]:
    """Return the keys of `model` that a size of SIZES stands for."""
    return dict(zip(SIZE_KEYS, SIZES[size], strict=True)) | LLAMA_KEYS.get(size, {})


def check_recompute(value: str) -> str:
    """Return `value` if it is auto, a level, or a level for the first layers; else raise
    ValueError.  Llama, which has no GELU and no LayerNorm, may say act and norm.

    >>> check_recompute("act+norm:4")
    'gelu+ln:4'
    """
    value = value.replace("act", "gelu").replace("norm", "ln")
    level, _, layers = value.partition(":")
    is_number = re.fullmatch("[1-9][0-9]{,8}", layers)
    if value in ("auto", *RECOMPUTE_LEVELS) or (level in RECOMPUTE_LEVELS[1:] and is_number):
        return value
    raise ValueError(
        f"must be auto, {', '.join(RECOMPUTE_LEVELS)}, or {RECOMPUTE_LEVELS[2]}:4 for 4 layers"
    )


def check_tokenizer(value: str) -> str:
    """Return `value` if it names a tokenizer, or may be the path of a tokenizer's file; else raise
    ValueError.  A run's configuration may name a file of another machine.
    """
    is_path = "/" in value or value.endswith(".json")
    if value in TOKENIZER_SIZES or is_path or value.startswith("sha256:"):
        return value
    if os.path.exists(value.partition("#")[0]):
        return f"./{value}"
    guess = closest(value, TOKENIZER_SIZES)
    names = ", ".join(TOKENIZER_SIZES)
    raise ValueError(
        f"must be {names}, or an existing tokenizer.json or its folder, or meta.pkl{guess}"
    )


def check_mixture(value: Any) -> Any:
    """Return data.train or data.val as PATH=WEIGHT,... of a list of {path, weight}; another value
    as it is.
    """
    if not isinstance(value, list):
        return value
    parts = []
    for row in value:
        if not isinstance(row, Mapping) or row.keys() != {"path", "weight"}:
            raise ValueError(f"{row!r} must be {{path: PATTERN, weight: NUMBER}}")
        if "," in str(row["path"]):
            raise ValueError(f"no path of a mixture may have a comma, as {row['path']} does")
        parts.append(f"{row['path']}={row['weight']}")
    return ",".join(parts)


def whole_number(text: str) -> int | None:
    """Return a whole number as people write it, 1_000, 1e9, 10B, 1.5M or
    64k; None for any other text.
    """
    units = {"k": 10**3, "m": 10**6, "b": 10**9}
    unit = units.get(text[-1:].lower(), 1)
    try:
        number = Decimal(text if unit == 1 else text[:-1]) * unit
        return int(number) if abs(number) < 2**63 and number == int(number) else None
    except ArithmeticError:
        return None


def closest(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return "; did you mean NAME?": names with the same last part, a similar
    name or last part, else "".
    """
    by_last = dict[str, list[str]]()
    for one in known:
        by_last.setdefault(one.rpartition(".")[2], []).append(one)
    last = name.rpartition(".")[2]
    cutoff = 0.66 if len(name) == 3 else 0.75
    similar = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    similar_lasts = difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)
    of_similar_last = [one for part in similar_lasts for one in by_last[part]]
    near = by_last.get(last) or similar or of_similar_last
    names = " or ".join(prefix + one for one in near)
    return f"; did you mean {names}?" if near else ""
