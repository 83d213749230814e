"""Sizes of GPT-2, Llama 3 and Qwen3 as benchmarks run them: one update per batch of sequences."""

from typing import NamedTuple

import numpy as np

from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.errors import ConfigError

T, VOCAB = 1024, ModelConfig().vocab_size  # of GPT-2


class Size(NamedTuple):
    batch: int  # sequences per step
    recompute: str  # memory.recompute in bf16
    T: int = T  # tokens of a sequence


MODELS = {  # by model.size
    "d12": Size(64, "gelu"),
    "d24": Size(64, "gelu+ln"),
    "d36": Size(32, "gelu+ln"),
    "d48": Size(16, "gelu+ln"),
}
SIZES = MODELS | {
    "llama:c768": Size(64, "none"),
    "llama:1b": Size(8, "gelu+ln", 2048),
    "qwen3:0.6b": Size(8, "gelu+ln", 2048),
}


class Work(NamedTuple):
    """The work of a step: model.size, sequences, memory.recompute, train.precision,
    optim.name, and further keys.
    """

    size: str
    batch: int
    recompute: str
    precision: str = "bf16"
    optim: str = "adamw"
    keys: tuple[str, ...] = ()  # words of a command line, as --fp8.keep_bf16 none

    def config(self, n_layer: int | None = None) -> Config:
        """Return the configuration of a run in bf16 with stochastic rounding; n_layer
        replaces the size's n_layer.
        """
        config = Config.model_validate(
            dict(
                model=dict(size=self.size),
                data=dict(tokenizer="llama3" if self.size == "llama:1b" else "gpt2"),
                train=dict(
                    batch_size=self.batch,
                    seq_len=SIZES[self.size].T,
                    total_batch_tokens=None,
                    precision=self.precision,
                ),
                optim=dict(name=self.optim, lr=3e-4, warmup=0, schedule="constant"),
                memory=dict(recompute=self.recompute),
            )
        )
        config = Config.load(config.to_dict(), parse_overrides(self.keys)) if self.keys else config
        return config.replace(model={"n_layer": n_layer}) if n_layer else config


def work_of(
    size: str, batch: int | None = None, recompute: str | None = None, precision: str = "bf16",
    optim: str = "adamw", keys: tuple[str, ...] = (),
) -> Work:  # fmt: skip
    """Return the work of a size, with the batch and recompute level of
    SIZES unless others are given; ConfigError for an unknown size.
    """
    if size not in SIZES:
        raise ConfigError(f"{size}: unknown size; known are {', '.join(SIZES)}")
    default = SIZES[size]
    return Work(
        size, batch or default.batch, recompute or default.recompute, precision, optim, keys
    )


def tokens_of(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids and targets of a micro-batch, int32 [B, T], equal in every call."""
    train = config.train
    shape = train.batch_size, train.seq_len + 1
    tokens = np.random.default_rng(1).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]
