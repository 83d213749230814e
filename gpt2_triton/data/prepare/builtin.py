"""The built-in text, which every CPython ships, as a data directory: pydoc's help topics."""

import hashlib
from pathlib import Path

from gpt2_triton.console import silent
from gpt2_triton.data.prepare.build import SHARD_TOKENS
from gpt2_triton.data.prepare.text import prepare_texts


def builtin_text() -> str:
    """Return pydoc's help topics, about 465,000 characters, which differ
    a little between versions.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def prepare_builtin(out_dir: Path, tokenizer: str = "bytes") -> Path:
    """Tokenise builtin_text() into out_dir; any number of processes may do so at once."""
    text = builtin_text()
    source = [{"file": "pydoc_data.topics", "sha256": _sha256(text)}]
    recipe = dict(tokenizer=tokenizer, val_fraction=0.1, shard_tokens=SHARD_TOKENS, source=source)
    return prepare_texts(lambda: [(0, text)], len(text), recipe, out_dir, 1)


def builtin_shards(tokenizer: str, root: Path = Path("data")) -> Path:
    """Return the directory of the built-in data, named by the hash of the
    text; make it on first use.
    """
    name = f"builtin_{tokenizer}_{_sha256(builtin_text())[:8]}"
    with silent():
        return prepare_builtin(root / name, tokenizer)


def pattern_of(given: str, split: str, tokenizer: str) -> str:
    """Return the pattern `given` as data.train or data.val; `builtin` becomes the
    built-in shards of the split.
    """
    return str(builtin_shards(tokenizer) / f"{split}_*.bin") if given == "builtin" else given


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
