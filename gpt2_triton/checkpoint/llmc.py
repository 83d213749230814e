"""Read and write llm.c's model files; write its tokenizer file, with which it decodes samples.

A file begins with a header of 256 little-endian int32, the last ones 0.

    model.bin           header: MODEL_MAGIC, version (3: fp32, 5: bf16), HEADER_SIZES, rows of wte
                        with padding parameters, matrices [out, in]: wte, wpe, each kind of layer
                        tensor for all layers, final norm
    gpt2_tokenizer.bin  header: TOKENIZER_MAGIC, version 2, number of tokens, end of text
                        each token: its length in a byte, and its bytes
"""

import math
from pathlib import Path

import numpy as np

from gpt2_triton.checkpoint.weights import (
    Weights,
    flat_length,
    from_bf16,
    model_config_from_sizes,
    parameter_shapes,
    round_bf16,
    tokenizer_of,
)
from gpt2_triton.data.tokenizer import Tokenizer
from gpt2_triton.errors import CheckpointError, ConfigError

MODEL_MAGIC = 20240326
TOKENIZER_MAGIC = 20240328
VERSIONS = {3: "fp32", 5: "bf16"}
STORAGE = {"fp32": "<f4", "bf16": "<i2"}
HEADER_BYTES = 1024
HEADER_SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")  # header[2:7]
MODEL = "model.bin"
TOKENIZER = "gpt2_tokenizer.bin"


def read(path: str) -> Weights:
    """Return the GPT-2 in a model file of llm.c, mapped into memory;
    CheckpointError if it is not complete.
    """
    path = f"{path}/{MODEL}" if Path(path).is_dir() else path  # an export
    where = f"llmc:{path}"
    try:
        header = np.fromfile(path, "<i4", HEADER_BYTES // 4)
        size = Path(path).stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{where}: cannot be read ({error.strerror}); expected a model file of llm.c"
        ) from None
    if len(header) < HEADER_BYTES // 4 or header[0] != MODEL_MAGIC:
        raise CheckpointError(
            f"{where}: not a model file of llm.c; expected 1 KiB that begins with {MODEL_MAGIC}"
        )
    if header[1] not in VERSIONS:
        raise CheckpointError(
            f"{where}: version {header[1]}, expected 3 (fp32) or 5 (bf16); "
            "write it again with a newer llm.c"
        )
    model = model_config_from_sizes(where, **dict(zip(HEADER_SIZES, header[2:7].tolist())))
    rows = int(header[7])
    storage = STORAGE[VERSIONS[int(header[1])]]
    elements = flat_length(model) + (rows - model.padded_vocab) * model.n_embd
    expected = HEADER_BYTES + elements * np.dtype(storage).itemsize
    if rows < model.vocab_size or size != expected:
        raise CheckpointError(
            f"{where}: {size:,} bytes, expected {expected:,} by its header; copy it again"
        )
    # "c": torch warns about read-only memory
    stored = np.memmap(path, storage, mode="c", offset=HEADER_BYTES)
    shapes = parameter_shapes(model)
    starts = {}
    start = 0
    for name in _order(shapes, model.n_layer):
        starts[name] = start
        start += rows * model.n_embd if name == "wte.weight" else math.prod(shapes[name])

    def read_rows(name: str, rows: slice) -> np.ndarray:
        shape = shapes[name]
        start = starts[name]
        values = stored[start : start + math.prod(shape)].reshape(shape)[rows]
        return values if storage == "<f4" else from_bf16(values)

    return Weights(where, model, tokenizer_of(model), read_rows)


def write(weights: Weights, directory: Path, dtype: str, tokenizer: Tokenizer | None) -> int:
    """Write model.bin in dtype "fp32" or "bf16", and gpt2_tokenizer.bin;
    return its number of tokens.
    """
    model = weights.model
    version = next(number for number, stored in VERSIONS.items() if stored == dtype)
    sizes = [getattr(model, name) for name in HEADER_SIZES]
    with open(directory / MODEL, "wb") as file:
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:8] = MODEL_MAGIC, version, *sizes, model.padded_vocab
        file.write(header.data)
        for name, first, values in weights.read_all(
            "exporting", _order(weights.shapes, model.n_layer)
        ):
            if name == "wte.weight" and first + len(values) == model.vocab_size:
                values = np.pad(values, ((0, model.padded_vocab - model.vocab_size), (0, 0)))
            stored = values if dtype == "fp32" else round_bf16(values)
            file.write(np.ascontiguousarray(stored, STORAGE[dtype]).data)
    if tokenizer is None:
        return 0
    _write_tokenizer(directory / TOKENIZER, tokenizer)
    return tokenizer.vocab_size


def _write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Write the bytes of each token; ConfigError for a token whose length fills no byte."""
    tokens = tokenizer.token_bytes()
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    longest = max(map(len, tokens))
    if longest > 255:
        raise ConfigError(
            f"format: llm.c's tokenizer file has tokens of at most 255 bytes, "
            f"{tokenizer.name} has one of {longest}; take hf"
        )
    header[:4] = TOKENIZER_MAGIC, 2, len(tokens), tokenizer.delimiter
    path.write_bytes(header.tobytes() + b"".join(bytes([len(token)]) + token for token in tokens))


def _order(shapes: dict[str, tuple[int, ...]], n_layer: int) -> list[str]:
    """Return the names in llm.c's order: one kind of tensor for all layers, then the next kind."""
    kinds = [name.removeprefix("h.0.") for name in shapes if name.startswith("h.0.")]
    layers = [f"h.{layer}.{kind}" for kind in kinds for layer in range(n_layer)]
    return ["wte.weight", "wpe.weight", *layers, "ln_f.weight", "ln_f.bias"]
