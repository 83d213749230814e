"""Export weights to the formats of other programs."""

from pathlib import Path

from gpt2_triton.checkpoint import huggingface, huggingface_llama, llmc, source_files
from gpt2_triton.checkpoint.sources import open_weights
from gpt2_triton.checkpoint.weights import Weights
from gpt2_triton.config.schema import choices
from gpt2_triton.console import print_line
from gpt2_triton.data.tokenizer import NAMES, get_tokenizer
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import FULL, new_directory

WRITERS = {"hf": huggingface.write, "llmc": llmc.write}


def export(source: str | Weights, out: Path, format: str, dtype: str) -> None:
    """Write the weights of a source (see sources.py), and its tokenizer if
    known, to the new directory `out`.

    `format` is "hf" or "llmc", `dtype` "fp32" or "bf16".  ConfigError for other values,
    and if `out` cannot be written.
    """
    for name, value, known in (("format", format, WRITERS), ("dtype", dtype, ("fp32", "bf16"))):
        if value not in known:
            raise ConfigError(f"{name}: expected {' or '.join(known)}, got {value}")
    weights = open_weights(source) if isinstance(source, str) else source
    for choice in choices(weights.model):
        if format not in choice.formats:
            todo = f"take {' or '.join(choice.formats)}"
            raise ConfigError(f"format: {format} has no {choice.key} {choice.value}; {todo}")
    is_there = format == "hf" and source_files.has_tokenizer(weights.beside)
    tokenizer = None
    if weights.tokenizer and not (is_there and weights.tokenizer in NAMES):
        tokenizer = get_tokenizer(weights.tokenizer)
    try:
        with new_directory(out) as directory:
            named = WRITERS[format](weights, directory, dtype, tokenizer)
    except OSError as error:
        todo = "make room" if error.errno in FULL else "choose another directory"
        raise ConfigError(f"{out}: cannot write: {error.strerror or error}; {todo}") from error
    rows = weights.model.vocab_size
    if named < rows:
        print_line(
            f"note: {rows - named:,} of {rows:,} tokens have no text in the exported tokenizer",
            error=True,
        )
    huggingface_llama.print_uncapped(weights.model)
