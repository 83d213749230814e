"""Weights in and out: the file formats that `init_from` reads and `export` writes."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from gpt2_triton import checkpoint, huggingface, llmc, nanogpt
from gpt2_triton.checkpoint import CheckpointError
from gpt2_triton.config import Config, ConfigError
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.weights import Weights, of_checkpoint, pack

READERS = {"hf": huggingface.read, "llmc": llmc.read, "nanogpt": nanogpt.read}
WRITERS = {"hf": huggingface.write, "llmc": llmc.write}


def initial(config: Config) -> dict[str, Tensor]:
    """`params`, and `low` where the run keeps fp32 masters, from the foreign file that init_from names."""
    source, _, where = config.init_from.partition(":")
    return pack(READERS[source](where), config)


def open_weights(source: str) -> Weights:
    """The weights of a run or a step directory; or, as KIND:WHERE, what init_from takes."""
    kind, _, where = source.partition(":")
    if kind in READERS and where:
        return READERS[kind](where)
    step_dir = checkpoint.find(Path(source))
    state, tensors = checkpoint.load(step_dir)
    try:
        config = Config.model_validate(state["config"])
    except ValidationError as error:
        raise CheckpointError(f"{step_dir}: its configuration is of another version of gpt2_triton") from error
    return of_checkpoint(str(step_dir), tensors, config)


def export(source: str, out: Path, format: str, dtype: str) -> Path:
    """Write the weights of `source` into the new directory `out`, with its tokenizer's files where it has one."""
    weights = open_weights(source)
    tokenizer = None if weights.tokenizer is None else get_tokenizer(weights.tokenizer)
    try:
        with new_directory(out) as directory:
            WRITERS[format](weights, directory, dtype, tokenizer)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--out: {out} could not be written ({error}); choose another, or free some space") from error
    return out


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to write into, which becomes `path` by one rename at the end, its files synced; nothing stays of a
    failure.  `path` may be there if it is empty.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(f"--out: {path} is there already; choose another, or remove it")
    hidden = path.absolute().with_name(f".{path.name}.tmp-{os.getpid()}")
    hidden.mkdir(parents=True)
    try:
        yield hidden
        for file in (*hidden.iterdir(), hidden):
            checkpoint.sync(file)
        os.rename(hidden, path)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    checkpoint.sync(path.absolute().parent)
