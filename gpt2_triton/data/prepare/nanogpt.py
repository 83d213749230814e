"""nanoGPT's train.bin and val.bin, tokens as uint16 without a header, as a
data directory.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt2_triton.console import Progress
from gpt2_triton.data.prepare import build
from gpt2_triton.data.prepare.build import Batch, Piece, ShardRecords
from gpt2_triton.data.tokenizer import GPT2Tokenizer, get_tokenizer
from gpt2_triton.errors import DataError
from gpt2_triton.files import sha256


def prepare_nanogpt(folder: Path, out_dir: Path) -> Path:
    """Write the tokens of folder/train.bin and folder/val.bin into out_dir."""
    tokenizer = tokenizer_of(folder)
    # the class: its merges may need a network
    known = GPT2Tokenizer if tokenizer == "gpt2" else get_tokenizer(tokenizer)
    files = {split: folder / f"{split}.bin" for split in ("train", "val")}
    tokens = {split: _map(path) for split, path in files.items()}
    size = sum(map(len, tokens.values()))
    with Progress(f"reading {folder}", 2 * size, "bytes") as progress:
        rows = [
            {"file": path.name, "sha256": sha256(path, progress.advance)} for path in files.values()
        ]
    recipe = dict(tokenizer=tokenizer, shard_tokens=build.SHARD_TOKENS, source=rows)
    source = _Tokens(str(folder), size, tokens, tokenizer, known.vocab_size)
    build.build(source, recipe, out_dir, size, 1)
    return out_dir


def tokenizer_of(folder: Path) -> str:
    """Return the tokenizer of nanoGPT's data: meta.pkl is there if the tokens are characters."""
    characters = folder / "meta.pkl"
    return str(characters) if characters.exists() else "gpt2"


def _map(path: Path) -> np.ndarray:
    """Return the tokens of a file, mapped; DataError unless they can have 16 bits."""
    try:
        tokens = np.memmap(path, "<u2", mode="r")
    except OSError as error:
        raise DataError(
            f"{path}: cannot read: {error.strerror}; name the folder of train.bin and val.bin"
        ) from None
    except ValueError:  # numpy's
        raise DataError(
            f"{path}: {path.stat().st_size:,} bytes, expected 2 for each token; copy it again"
        ) from None
    if not tokens[1:2000:2].any():
        raise DataError(
            f"{path}: every second token is 0, as if they had 32 bits; write them as uint16"
        )
    return tokens


class _Tokens:
    """Tokens of train and val as a Source; a state is the number of batches before one."""

    unit = "tokens"

    def __init__(
        self,
        name: str,
        size: int | None,
        tokens: dict[str, np.ndarray],
        tokenizer: str,
        vocab_size: int,
    ):
        self.name = name
        self.size = size
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def next_shard(self, split: str, shards: ShardRecords) -> tuple[str, int]:
        return build.numbered(split, shards), build.SHARD_TOKENS

    def batches(self, state: int | None) -> Iterator[Batch]:
        step = build.BATCH_CHARS
        places = [
            (split, i)
            for split, tokens in self._tokens.items()
            for i in range(0, len(tokens), step)
        ]
        done = state or 0
        for number, (split, first) in enumerate(places[done:], done):
            tokens = self._tokens[split][first : first + step]
            largest = tokens.max()
            if largest >= self._vocab_size:
                raise DataError(
                    f"{self.name}/{split}.bin: a token {largest} after the first {first:,}, but "
                    f"{self._tokenizer} has {self._vocab_size:,}; give files that belong together: "
                    "GPT-2's tokens have no meta.pkl"
                )
            yield Batch(split, number, [Piece(tokens)])
