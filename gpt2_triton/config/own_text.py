"""The keys of a run on a user's own text: a recipe for its length and the machine, and what
the recipe leaves to the text.

configs/own*.yaml are the recipes.  They say where their keys come from.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpt2_triton.config.config import Config
from gpt2_triton.config.recipes import OWN
from gpt2_triton.config.rules import HUB_SIZES, INIT_SOURCES, LONGEST_CONTEXT
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.config.values import LLAMA_KEYS, whole_number
from gpt2_triton.errors import DataError

VAL_FRACTION = 0.1  # of the characters
# (key, default) -> the number given for the key, else the default
Number = Callable[[str, int], int]


class Machine(NamedTuple):
    """What a run gets, on this machine or another."""

    gpus: int
    gpu_gib: float | None  # of each; None: a CPU


class Choice(NamedTuple):
    """The recipe for a text, whose train.steps and optim.warmup are the most that a run gets."""

    recipe: str
    epochs: int  # at most
    validations: int  # and checkpoints

    @property
    def config(self) -> Config:
        """The recipe as it is, before the text and the machine are known."""
        return Config.load(self.recipe)


ON_A_CPU = Choice("own_cpu", epochs=10, validations=5)
FINETUNING = Choice("own_finetune", epochs=3, validations=10)
# by the least characters.  Up to 20 MB a text is read as bytes: GPT-2's table of 50,257 tokens
# would be most of the model
ON_A_GPU = {
    0: Choice("own_tiny", epochs=40, validations=20),
    500_000: Choice(OWN, epochs=40, validations=20),
    5_000_000: Choice("own_5mb", epochs=10, validations=20),
    20_000_000: Choice("own_20mb", epochs=4, validations=20),
    500_000_000: Choice("own_500mb", epochs=4, validations=40),
    5_000_000_000: Choice("own_5gb", epochs=4, validations=80),
}
# Least steps between validations of finetuning, but at least one an epoch: each gives a new best
# checkpoint, whose 12 bytes and a hash for each parameter take as long as 200 steps
FINETUNING_APART = 200
# tokens of a micro-batch by GPU memory in GiB: the plan of GPT-2 124M fits with some recomputation
MICRO_BATCH_TOKENS = ((70, 65_536), (20, 16_384), (0, 4096))


def choice_for(characters: int, machine: Machine, given: Mapping[str, str]) -> Choice:
    """Return the recipe for a text of this length."""
    if given.get("init_from", "").partition(":")[0] in INIT_SOURCES:
        return FINETUNING
    if machine.gpu_gib is None:
        return ON_A_CPU
    return [choice for least, choice in ON_A_GPU.items() if least <= characters][-1]


def choose(
    choice: Choice,
    tokens: int,
    machine: Machine,
    tokenizer: str,
    vocab_size: int,
    given: Mapping[str, str],
    source: ModelConfig | None = None,
) -> dict[str, Any]:
    """Return keys for a text, beside those of its recipe.  They follow the `given` keys and do not
    repeat them.

    tokens       of the text, about: `tokenizer` may need one for four characters, or two for each
    vocab_size   of the tokenizer; a model.size may say another
    source       the model of init_from, if it was read

    DataError if the text is too short for a sequence of validation.
    """
    recipe = choice.config

    def number(key: str, default: int) -> int:
        found = whole_number(given.get(key, ""))  # Config.load refuses a wrong value
        return default if found is None else max(1, found)

    T = recipe.train.seq_len
    if source:  # a short text gives 64 sequences
        T = min(source.block_size, LONGEST_CONTEXT, max(T, _power_of_2(tokens // 64)))
    T = number("train.seq_len", T)
    val_tokens = _validation_tokens(tokens, T)
    train_tokens = tokens - val_tokens
    batch, step_tokens = _batch(recipe, train_tokens // T, T, machine, number)
    step_tokens = number("train.total_batch_tokens", step_tokens)
    epochs = max(1, choice.epochs * train_tokens // step_tokens)
    steps = number("train.steps", min(recipe.train.steps, epochs))
    every = max(_least_apart(choice, steps), steps // choice.validations)
    evaluated = recipe.eval.tokens // T * T
    of_size = LLAMA_KEYS.get(given.get("model.size", ""), {})
    keys: dict[str, Any] = {
        "model.vocab_size": of_size.get("vocab_size", vocab_size),
        **_sizes(choice, recipe, T, given, number, source),
        "data.tokenizer": tokenizer,
        "train.steps": steps,
        "train.batch_size": batch,
        "train.seq_len": T,
        "train.total_batch_tokens": step_tokens,
        "train.dtype": "bf16" if machine.gpu_gib else "fp32",
        # of 10 steps, 2e-3 gives a spike
        "optim.warmup": min(recipe.optim.warmup, max(steps // 10, min(30, steps // 3))),
        "eval.every": every,
        # the end may have fewer tokens
        "eval.tokens": evaluated if 0 < 2 * evaluated <= val_tokens else 0,
        "sample.every": max(1, steps // 2),
        "checkpoint.every": every,
    }
    keys |= _agreeing(recipe, given, keys)
    return {key: value for key, value in keys.items() if key not in given}


def _validation_tokens(tokens: int, T: int) -> int:
    """Return the tokens of the text's end; DataError if they are no sequence."""
    needed = math.ceil((T + 4) / VAL_FRACTION)
    if tokens < needed:
        raise DataError(
            f"--data: {tokens:,} tokens are too little text; a sequence of validation needs "
            f"{needed:,}; give more text, or a smaller --train.seq_len"
        )
    return int(tokens * VAL_FRACTION)


def _least_apart(choice: Choice, steps: int) -> int:
    """Return the least steps between validations."""
    return min(FINETUNING_APART, math.ceil(steps / choice.epochs)) if choice is FINETUNING else 1


def _agreeing(recipe: Config, given: Mapping[str, str], chosen: dict[str, Any]) -> dict[str, Any]:
    """Return other values for the recipe's keys that given or chosen ones would contradict."""
    keys: dict[str, Any] = {}
    if given.get("eval.every") == "0" or given.get("checkpoint.best") == "none":
        keys |= {"checkpoint.best": "none", "train.patience": 0}
    if "optim.weight_decay" in given:
        keys["optim.tau"] = None
    if given.get("train.dtype", chosen["train.dtype"]) == "fp32":
        keys["optim.master"] = "none"
    arch = given.get("model.arch", chosen.get("model.arch"))
    if arch == "llama" or given.get("model.size") in LLAMA_KEYS:
        keys["model.dropout"] = 0.0
    if given.get("optim.name") == "adamw":
        keys |= {"optim.lr": min(recipe.optim.lr, 1e-3), "optim.adamw_lr": None}
    return keys


def _sizes(
    choice: Choice,
    recipe: Config,
    T: int,
    given: Mapping[str, str],
    number: Number,
    source: ModelConfig | None,
) -> dict[str, Any]:
    """Return the keys of the model's size; the weights of init_from decide it."""
    if source and "model.size" not in given:
        sizes = source.model_dump(exclude_none=True, exclude={"dropout"})
        return {f"model.{key}": value for key, value in sizes.items()}
    if choice is FINETUNING:
        name = given["init_from"].replace(":", "/").rpartition("/")[2]
        sized = {"model.size", "model.n_layer", "model.n_head", "model.n_embd"} & given.keys()
        return {} if sized else {"model.size": HUB_SIZES.get(name, "d12")}
    if "model.size" in given:
        return {"model.block_size": T}
    width = number("model.n_embd", 64 * number("model.n_head", recipe.model.n_head))
    heads = max(1, width // 64)
    keys = {"model.n_embd": width, "model.n_head": heads, "model.block_size": T}
    return keys | _block(recipe.model, width, heads, given)


def _block(m: ModelConfig, width: int, heads: int, given: Mapping[str, str]) -> dict[str, Any]:
    """Return a Llama recipe's block at another width, or what replaces it by model.arch gpt2."""
    if m.arch == "gpt2":
        return {}
    if given.get("model.arch") == "gpt2":
        return {"model.n_kv_head": None, "model.n_inner": None, "model.qk_norm": False}
    inner = max(1, m.inner * width // m.n_embd // 64) * 64
    return {"model.n_kv_head": math.gcd(heads, m.n_kv_head or heads), "model.n_inner": inner}


def _batch(
    recipe: Config, sequences: int, T: int, machine: Machine, number: Number
) -> tuple[int, int]:
    """Return (train.batch_size, tokens of a step), of at least eight steps an epoch."""
    gpus, gpu_gib = machine
    unit = T * gpus  # tokens of a sequence on each GPU
    most = recipe.train.step_tokens
    rows = max(1, _power_of_2(min(most // T, sequences // 8)) // gpus)  # sequences on each GPU
    rows = max(1, number("train.total_batch_tokens", rows * unit) // unit)
    limit = most
    if gpu_gib is not None:
        limit = next(tokens for gib, tokens in MICRO_BATCH_TOKENS if gpu_gib >= gib)
    batch = number("train.batch_size", math.gcd(rows, _power_of_2(limit // T)))
    return batch, batch * max(1, rows // batch) * unit


def _power_of_2(n: int) -> int:
    """Return the largest power of two that is at most n, and at least 1."""
    return 1 << max(1, n).bit_length() - 1


def summary(config: Config, characters: int, tokens: int, machine: Machine) -> str:
    """Return what was chosen for a text, in four lines for the console."""
    where = "the CPU" if machine.gpu_gib is None else "a GPU"
    m = config.model
    t = config.train
    o = config.optim
    return f"""own text: {characters:,} characters, on {where}; \
tokenizer {config.data.tokenizer}, {tokens:,} tokens
  model: layers {m.n_layer}, heads {m.n_head}, channels {m.n_embd}
  steps: {t.steps:,} of {t.step_tokens:,} tokens, sequences of {t.seq_len:,}, \
batch {t.batch_size}, \
optimizer {o.name}, learning rate {o.lr:g}, warmup {o.warmup}
  steps between validations {config.eval.every}, checkpoints {config.checkpoint.every}, \
samples {config.sample.every}; \
any key can be given, as in --train.steps {2 * t.steps}"""
