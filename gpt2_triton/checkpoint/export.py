"""Export weights to the formats of other programs."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from gpt2_triton.checkpoint import huggingface, llmc
from gpt2_triton.checkpoint.save import sync
from gpt2_triton.checkpoint.sources import open_weights
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import ConfigError

WRITERS = {"hf": huggingface.write, "llmc": llmc.write}


def export(source: str, out: Path, format: str, dtype: str) -> None:
    """Write the weights of a source (see sources.py), and its tokenizer if known, to the new directory `out`."""
    try:
        with new_directory(out) as directory:
            weights = open_weights(source)
            tokenizer = None if weights.tokenizer is None else get_tokenizer(weights.tokenizer)
            WRITERS[format](weights, directory, dtype, tokenizer)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--out: {out} could not be written ({error}); choose another, or free some space") from error


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a hidden directory; at the end sync its files and rename it to `path`, which may be an empty directory.

    After an error nothing is left.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(f"--out: {path} is there already; choose another, or remove it")
    hidden = path.absolute().with_name(f".{path.name}.tmp-{os.getpid()}")
    hidden.mkdir(parents=True)
    try:
        yield hidden
        for file in (*hidden.iterdir(), hidden):
            sync(file)
        os.rename(hidden, path)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    sync(path.absolute().parent)
