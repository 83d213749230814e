"""The keys of a run on a user's own text, picked for the length of the text and for the machine.

Where the rows of the tables come from:
  tokenizer   GPT-2's table of 50,257 rows is most of a small model, and most of its work on a
              CPU.  A text of 20 MB has 5M tokens and shows each row 100 times on average.
              Shorter texts are trained as bytes.
  epochs      Up to 4 epochs are worth nearly as much as new text (Muennighoff et al. 2023,
              "Scaling Data-Constrained Language Models").  A short text gets 40 or 10, with the
              keys of SHORT against overfitting.
  model       From 20 MB on a parameter gets about 20 tokens, epochs counted (Hoffmann et al. 2022).
              For less text that rule gives models too small to spell.  nanoGPT's
              train_shakespeare_char.py trains 6 layers of 384 channels on 1 MB, with steps of
              16,384 characters at 1e-3; its model for a CPU has 4 layers of 128.
              From 5 GB on the model is GPT-2 124M with llm.c's steps, at most
              the 10B tokens of gpt2_124m.
  CPU         nanoGPT's model for a CPU.  On tinyshakespeare 500 steps of 1024 characters
              end at 1.77 with Muon at 0.01, and at 1.81 at 0.02.  A step takes the
              interpreter 0.5 seconds of a core.
  saves       Each validation of fine-tuning gives a new best checkpoint.  Writing 12 bytes and
              a hash for each parameter takes as long as some 200 steps of 8,192 tokens,
              whatever the size of the model.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpt2_triton.config.config import Config
from gpt2_triton.config.rules import HUB_SIZES, INIT_SOURCES, LONGEST_CONTEXT, TOKENIZER_SIZES
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.config.values import whole_number
from gpt2_triton.errors import DataError

VAL_FRACTION = 0.1  # of the characters
# (key, default) -> the number given for the key, else the default
Number = Callable[[str, int], int]


class Preset(NamedTuple):
    """The keys of a text of at least `characters` characters."""

    characters: int
    tokenizer: str
    n_layer: int
    n_embd: int
    seq_len: int
    step_tokens: int
    tuned: Mapping[str, Any]
    epochs: int
    most_steps: int
    most_warmup: int
    eval_tokens: int
    validations: int  # and checkpoints
    sample_tokens: int


# For a text that a run reads many times: the best of 20 runs on tinyshakespeare.  Its lowest
# validation loss is 1.446.  The loss with other keys, one seed each:
#   dropout 0.3, 0.2, 0.1, 0       1.451, 1.466, 1.489, 1.513
#   optim.tau 1, 2, 8              1.470, 1.454, 1.448
#   optim.lr 3e-3, 1.2e-2          1.455, 1.456
#   AdamW 1e-3, tau 2, dropout 0.3 1.462
# From 5 MB on a model of 10M parameters overfits less, so that less dropout is a guess there.
SHORT = {
    "model.dropout": 0.4,
    "data.windows": "shifted",
    "train.patience": 5,
    "optim.name": "muon",
    "optim.lr": 6e-3,
    "optim.tau": 4.0,
    "optim.beta2": 0.99,
    "optim.master": "fp32",
}
LONG = {"optim.lr": 1e-3}
OF_124M = {"optim.lr": 6e-4, "train.precision": "auto"}  # fp8's price is known at this size alone
FINETUNING = {
    "model.dropout": 0.1,  # as GPT-2 was trained
    "data.windows": "shifted",
    "train.patience": 3,
    "optim.lr": 3e-5,
    "optim.master": "fp32",
}
CPU = (
    Preset(
        0,
        "bytes",
        4,
        128,
        128,
        1024,
        {"optim.name": "muon", "optim.lr": 0.01},
        10,
        600,
        100,
        16_384,
        5,
        300,
    ),
)
GPU = (
    Preset(0, "bytes", 4, 256, 256, 16_384, SHORT, 40, 20_000, 100, 262_144, 20, 300),
    Preset(500_000, "bytes", 6, 384, 256, 16_384, SHORT, 40, 20_000, 100, 262_144, 20, 300),
    Preset(
        5_000_000,
        "bytes",
        6,
        384,
        256,
        16_384,
        SHORT | {"model.dropout": 0.1},
        10,
        20_000,
        100,
        262_144,
        20,
        300,
    ),
    Preset(20_000_000, "gpt2", 6, 384, 512, 65_536, LONG, 4, 20_000, 700, 524_288, 20, 100),
    Preset(500_000_000, "gpt2", 8, 512, 1024, 131_072, LONG, 4, 20_000, 700, 1_048_576, 40, 100),
    Preset(
        5_000_000_000, "gpt2", 12, 768, 1024, 524_288, OF_124M, 4, 19_560, 700, 10_485_760, 80, 100
    ),
)
# of init_from
HUB = Preset(0, "gpt2", 12, 768, 1024, 8192, FINETUNING, 3, 20_000, 100, 262_144, 10, 200)
HUB_APART = 200  # least steps between validations of fine-tuning, but at least one an epoch
# tokens of a micro-batch by GPU memory in GiB: the plan of GPT-2 124M fits with some recomputation
MICRO_BATCH_TOKENS = ((70, 65_536), (20, 16_384), (0, 4096))


def preset_for(characters: int, gpu_gib: float | None, given: Mapping[str, str]) -> Preset:
    """Return the preset for a text of this length on a GPU, or on a CPU if `gpu_gib` is None."""
    if given.get("init_from", "").partition(":")[0] in INIT_SOURCES:
        return HUB
    return [
        preset for preset in (CPU if gpu_gib is None else GPU) if preset.characters <= characters
    ][-1]


def choose(
    characters: int, tokens: int, gpu_gib: float | None, tokenizer: str, given: Mapping[str, str],
    gpus: int = 1, source: ModelConfig | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return keys for a text of this length.  They follow the `given` keys and do not repeat them.

    tokens    of the text, about: `tokenizer` may need one for four characters, or two for each
    gpu_gib   the memory of a GPU, None on a CPU
    source    the model of init_from, if it was read

    DataError if the text is too short for a sequence of validation.
    """
    preset, cpu = preset_for(characters, gpu_gib, given), gpu_gib is None

    def number(key: str, default: int) -> int:
        found = whole_number(given.get(key, ""))  # Config.load refuses a wrong value
        return default if found is None else max(1, found)

    T = preset.seq_len
    if source:  # a short text gives 64 sequences
        T = min(source.block_size, LONGEST_CONTEXT, max(T, _power_of_2(tokens // 64)))
    T = number("train.seq_len", T)
    needed = math.ceil((T + 4) / VAL_FRACTION)
    if tokens < needed:
        wrong = (
            f"--data: {tokens:,} tokens are too little text; "
            f"a sequence of validation needs {needed:,}"
        )
        raise DataError(f"{wrong}; give more text, or a smaller --train.seq_len")
    val_tokens = int(tokens * VAL_FRACTION)
    train_tokens = tokens - val_tokens
    batch, step_tokens = _batch(preset, train_tokens // T, T, gpu_gib, gpus, number)
    step_tokens = number("train.total_batch_tokens", step_tokens)
    steps = number(
        "train.steps", min(preset.most_steps, max(1, preset.epochs * train_tokens // step_tokens))
    )
    apart = min(HUB_APART, math.ceil(steps / preset.epochs)) if preset is HUB else 1
    every, evaluated = max(apart, steps // preset.validations), preset.eval_tokens // T * T
    keys: dict[str, Any] = {
        "model.vocab_size": TOKENIZER_SIZES.get(tokenizer, 256),
        **_sizes(preset, T, given, number, source),
        "data.tokenizer": tokenizer,
        "train.steps": steps,
        "train.batch_size": batch,
        "train.seq_len": T,
        "train.total_batch_tokens": step_tokens,
        "train.dtype": "fp32" if cpu else "bf16",
        **preset.tuned,
        # of 10 steps, 2e-3 gives a spike
        "optim.warmup": min(preset.most_warmup, max(steps // 10, min(30, steps // 3))),
        "eval.every": every,
        # the end may have fewer tokens
        "eval.tokens": evaluated if 0 < 2 * evaluated <= val_tokens else 0,
        "sample.every": max(1, steps // 2),
        "sample.tokens": preset.sample_tokens,
        "checkpoint.every": every,
    }
    _agree_with(given, keys)
    return {key: value for key, value in keys.items() if key not in given}


def _agree_with(given: Mapping[str, str], keys: dict[str, Any]) -> None:
    """Change the keys that a given key would contradict."""
    if given.get("eval.every") == "0" or given.get("checkpoint.best") == "none":
        keys |= {"checkpoint.best": "none", "train.patience": 0}
    if "optim.weight_decay" in given:
        keys.pop("optim.tau", None)
    if given.get("train.dtype", keys["train.dtype"]) == "fp32":
        keys.pop("optim.master", None)
    if "llama" in (
        given.get("model.arch", keys.get("model.arch")),
        given.get("model.size", "")[:5],
    ):
        keys["model.dropout"] = 0.0
    if given.get("optim.name") == "adamw":
        keys["optim.lr"] = min(keys["optim.lr"], 1e-3)


def _sizes(
    preset: Preset, T: int, given: Mapping[str, str], number: Number, source: ModelConfig | None
) -> dict[str, Any]:
    """Return the keys of the model's size; the weights of init_from decide it."""
    if source and "model.size" not in given:
        return {
            f"model.{key}": value for key, value in source.model_dump(exclude_none=True).items()
        }
    if preset is HUB:
        name = given["init_from"].replace(":", "/").rpartition("/")[2]
        sized = {"model.size", "model.n_layer", "model.n_head", "model.n_embd"} & given.keys()
        return {} if sized else {"model.size": HUB_SIZES.get(name, "d12")}
    width = number("model.n_embd", 64 * number("model.n_head", preset.n_embd // 64))
    sizes = {
        "model.n_layer": preset.n_layer,
        "model.n_embd": width,
        "model.n_head": max(1, width // 64),
    }
    return ({} if "model.size" in given else sizes) | {"model.block_size": T}


def _batch(
    preset: Preset, sequences: int, T: int, gpu_gib: float | None, gpus: int, number: Number
) -> tuple[int, int]:
    """Return (train.batch_size, tokens of a step): at least eight steps an epoch,
    equally many sequences a GPU.
    """
    step_rows = max(1, _power_of_2(min(preset.step_tokens // T, sequences // 8)) // gpus)
    step_rows = max(1, number("train.total_batch_tokens", step_rows * T * gpus) // (T * gpus))
    limit = (
        preset.step_tokens
        if gpu_gib is None
        else next(n for gib, n in MICRO_BATCH_TOKENS if gpu_gib >= gib)
    )
    batch = number("train.batch_size", math.gcd(step_rows, _power_of_2(limit // T)))
    return batch, batch * max(1, step_rows // batch) * gpus * T


def _power_of_2(n: int) -> int:
    """Return the largest power of two that is at most n, and at least 1."""
    return 1 << max(1, n).bit_length() - 1


def summary(config: Config, characters: int, tokens: int, machine: str) -> str:
    """Return lines that show what was chosen."""
    m = config.model
    t = config.train
    o = config.optim
    return f"""own text: {characters:,} characters, on {machine}; \
tokenizer {config.data.tokenizer}, {tokens:,} tokens
  model: layers {m.n_layer}, heads {m.n_head}, channels {m.n_embd}
  steps: {t.steps:,} of {t.step_tokens:,} tokens, sequences of {t.seq_len:,}, \
batch {t.batch_size}, \
optimizer {o.name}, learning rate {o.lr:g}, warmup {o.warmup}
  steps between validations {config.eval.every}, checkpoints {config.checkpoint.every}, \
samples {config.sample.every}; \
any key can be given, as in --train.steps {2 * t.steps}"""
