"""`prepare`: make token shards for training."""

import os
from pathlib import Path
from typing import Literal

from gpt2_triton.cli import make_app, require_least
from gpt2_triton.config import ConfigError

app = make_app("prepare", "Make token shards for training.")
Tokenizer = Literal["gpt2", "bytes"]


@app.command(name="text")
def prepare_text(
    *inputs: Path,
    out: Path = Path("data/text"),
    tokenizer: Tokenizer = "gpt2",
    val_fraction: float = 0.1,
    workers: int | None = None,
) -> None:
    """Tokenise UTF-8 text: .txt, one document a file, and .jsonl, one a line in its field "text"; each also as .gz.

    Parameters
    ----------
    inputs: Path
        Files, folders, which are searched for such files, and quoted globs.
    out: Path
        Directory of the shards, train_*.bin and val_*.bin.
    tokenizer: str
        Tokenizer; data.tokenizer of the configuration must say the same.
    val_fraction: float
        Last part of the text that becomes validation data.
    workers: int
        Processes that tokenise; by default one a CPU.
    """
    if not inputs:
        raise ConfigError("prepare text: expected one or more text files")
    if workers is None:
        workers = os.cpu_count() or 1
    require_least(workers=(workers, 1))
    from gpt2_triton.data import prepare

    prepare.prepare_text(inputs, out, tokenizer, val_fraction, workers)


@app.command(name="builtin")
def prepare_builtin(*, out: Path = Path("data/builtin"), tokenizer: Tokenizer = "bytes") -> None:
    """Tokenise the text that every Python ships, the help topics of its reference manual.

    Parameters
    ----------
    out: Path
        Directory of the shards, train_*.bin and val_*.bin.
    tokenizer: str
        Tokenizer; data.tokenizer of the configuration must say the same.
    """
    from gpt2_triton.data import prepare

    prepare.prepare_builtin(out, tokenizer)
