"""The built-in text, which every Python has, as a data directory: the names of
Unicode's characters.
"""

import functools
import hashlib
import random
import sys
import unicodedata
from pathlib import Path

from gpt2_triton.console import silent
from gpt2_triton.data.prepare.build import SHARD_TOKENS
from gpt2_triton.data.prepare.text import prepare_texts


@functools.cache
def builtin_text() -> str:
    """Return names of characters, a line for each, in a random order that is always the same:
    about 900,000 characters, some more in newer versions of Python.

    A small model soon spells them, since few words make many names.
    """
    names = []
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if not name or name.startswith("HANGUL SYLLABLE"):
            continue
        if not name.endswith(f"-{code:04X}"):
            names.append(name.lower())
    random.Random(0).shuffle(names)
    return "\n".join(names)


def prepare_builtin(out_dir: Path, tokenizer: str = "bytes") -> Path:
    """Tokenise builtin_text() into out_dir; any number of processes may do so at once."""
    text = builtin_text()
    source = [{"file": "unicodedata", "sha256": _sha256(text)}]
    recipe = dict(tokenizer=tokenizer, val_fraction=0.1, shard_tokens=SHARD_TOKENS, source=source)
    return prepare_texts(lambda: [(0, text)], len(text), recipe, out_dir, 1)


def builtin_shards(tokenizer: str) -> Path:
    """Return the directory of the built-in data, named by the hash of the
    text; make it on first use.
    """
    name = f"builtin_{tokenizer}_{_sha256(builtin_text())[:8]}"
    with silent():
        return prepare_builtin(Path("data") / name, tokenizer)


def pattern_of(given: str, split: str, tokenizer: str) -> str:
    """Return the pattern `given` as data.train or data.val; `builtin` becomes the
    built-in shards of the split.
    """
    return str(builtin_shards(tokenizer) / f"{split}_*.bin") if given == "builtin" else given


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
