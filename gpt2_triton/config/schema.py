"""Every key of the configuration: its type, limits, default (llm.c's recipe for GPT-2 124M on FineWeb) and meaning.

Values may be strings, as overrides are; pydantic reads the numbers in them.  What a key can check by itself stands in
its declaration; config.py has the rules between keys.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

VOCAB_MULTIPLE = 128  # padded_vocab: whole tiles for the head's products

# On the command line every value is a string, so `null` stands for "not given", as in YAML.
OptionalInt = Annotated[int | None, BeforeValidator(lambda value: None if value == "null" else value)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        if isinstance(value, bool):  # pydantic reads true as 1, and YAML reads off as false
            raise ValueError("takes no true or false (YAML reads yes, no, on, off so; quote a word)")
        return value


class ConflictError(ValueError):
    """Fields that are each valid and do not go together: (key, message) pairs."""

    def __init__(self, problems: list[tuple[str, str]]):
        self.problems = problems
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))


# llm.c's descriptors: layers, channels, heads, longest sequence.  GPT-3's are dense here, as in llm.c.
_GPT2 = {
    6: (384, 6), 12: (768, 12), 24: (1024, 16), 36: (1280, 20), 48: (1600, 25), 60: (1920, 30), 72: (2880, 30),
    84: (3456, 36),
}  # fmt: skip
_GPT3 = {
    384: (6, 6), 768: (12, 12), 1024: (24, 16), 1536: (24, 16), 2048: (24, 16), 2560: (32, 32), 4096: (32, 32),
    12288: (96, 96),
}  # fmt: skip
SIZES = {f"d{layers}": (layers, width, heads, 1024) for layers, (width, heads) in _GPT2.items()}
SIZES |= {f"gpt3:c{width}": (layers, width, heads, 2048) for width, (layers, heads) in _GPT3.items()}
SIZE_KEYS = ("n_layer", "n_embd", "n_head", "block_size")


class ModelConfig(Section):
    size: str | None = Field(
        None,
        exclude=True,
        description="llm.c's name, d6 to d84 or gpt3:c384 to gpt3:c12288, for layers, heads, channels, block_size",
    )
    n_layer: int = Field(12, ge=1, description="transformer layers")
    n_head: int = Field(12, ge=1, description="attention heads; n_embd / n_head is 64, 80, 96 or 128")
    n_embd: int = Field(768, ge=1, multiple_of=16, description="channels of the residual stream")
    vocab_size: int = Field(50257, ge=2, le=65536, description="tokens in the vocabulary; shards hold 16-bit tokens")
    block_size: int = Field(1024, ge=1, description="longest sequence: rows of the position embedding")

    @model_validator(mode="before")
    @classmethod
    def _expand_size(cls, values: Any) -> Any:
        """`size` becomes the keys it stands for; block_size alone may say otherwise."""
        if not isinstance(values, dict) or values.get("size") in (None, "null"):
            return values
        size, given = values["size"], {key: value for key, value in values.items() if key != "size"}
        if size not in SIZES:
            raise ConflictError([("model.size", f"unknown size {size}; known are {', '.join(SIZES)}")])
        known = dict(zip(SIZE_KEYS, SIZES[size], strict=True))
        for key in SIZE_KEYS[:3]:
            if str(given.get(key, known[key])) != str(known[key]):
                wrong = f"{size} has {key} {known[key]}, and {key} says {given[key]}; remove one"
                raise ConflictError([("model.size", wrong)])
        return known | given

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class DataConfig(Section):
    train: str = Field(
        "data/fineweb10B/train_*.bin", min_length=1, description="training shards: path, pattern or builtin"
    )
    val: str = Field(
        "data/fineweb10B/val_*.bin", min_length=1, description="validation shards: path, pattern or builtin"
    )
    tokenizer: Literal["gpt2", "bytes"] = Field("gpt2", description="tokenizer of the shards and of samples")
    seed: int = Field(42, ge=0, lt=2**62, description="seed of the order of samples")


class TrainConfig(Section):
    steps: int = Field(19560, ge=1, description="optimizer steps")
    batch_size: int = Field(
        64, ge=1, description="most sequences a GPU takes at once; a step of more accumulates gradients"
    )
    seq_len: int = Field(1024, ge=1, description="tokens of a training sequence")
    total_batch_tokens: OptionalInt = Field(None, ge=1, description="tokens of a step; null is batch_size * seq_len")
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="storage of parameters and activations")
    seed: int = Field(42, ge=0, lt=2**62, description="seed of the initial weights and of stochastic rounding")
    skip_limit: int = Field(10, ge=0, description="stop after this many non-finite steps in a row; 0 never stops")
    skip_loss_z: float = Field(
        0,
        ge=0,
        le=11,
        description="skip an update whose loss is this many standard deviations above the mean of 128 steps; 0 never",
    )
    skip_norm_z: float = Field(0, ge=0, le=11, description="the same for the gradient norm")
    rewind_after: int = Field(
        0,
        ge=0,
        description="after this many skipped steps in a row go back to a checkpoint and leave their data out; 0 never",
    )


class OptimConfig(Section):
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    warmup: int = Field(700, ge=0, description="steps of linear warmup")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="learning rate after the warmup"
    )
    final_frac: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a fraction of lr")
    wsd_decay_frac: float = Field(
        0.2, gt=0, le=1, description="fraction of the steps over which the wsd schedule decays"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of AdamW's second moment")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of matrices and embeddings")
    clip: float = Field(1.0, ge=0, description="largest global norm of the gradient; 0 does not clip")
    master: Literal["none", "fp32"] = Field(
        "none", description="none: bf16 weights, rounded stochastically; fp32: 16 more bits beside them"
    )


RECOMPUTE_LEVELS = ("none", "gelu", "gelu+ln", "gelu+ln+qkv", "block")  # each keeps less than the one before


def check_recompute(value: str) -> str:
    """The value; ValueError if it is not auto, one of these levels, or one but the first in so many layers."""
    level, colon, layers = value.partition(":")
    some = level in RECOMPUTE_LEVELS[1:] and layers.isdecimal() and int(layers) > 0
    if value == "auto" or value in RECOMPUTE_LEVELS or colon and some:
        return value
    raise ValueError(
        f"must be auto, {', '.join(RECOMPUTE_LEVELS[:-1])} or {RECOMPUTE_LEVELS[-1]}, "
        f"or {RECOMPUTE_LEVELS[2]}:4 for 4 layers"
    )


class MemoryConfig(Section):
    recompute: Annotated[str, AfterValidator(check_recompute)] = Field(
        "gelu",
        description=f"what the backward pass computes again: {', '.join(RECOMPUTE_LEVELS)}; gelu+ln:4 is gelu+ln in "
        "the first 4 layers, gelu in the others; auto takes the first that fits",
    )
    head_rows: OptionalInt = Field(
        None, ge=1, description="rows of logits at once; null is 11264 up to n_embd 768, 16384 up to 1024, else 10112"
    )


class EvalConfig(Section):
    every: int = Field(250, ge=0, description="validate every so many steps, and after the last; 0 never")
    tokens: int = Field(10_485_760, ge=0, description="validation tokens, the same ones each time; 0 takes all")
    hellaswag_every: int = Field(0, ge=0, description="run HellaSwag every so many steps, and after the last; 0 never")
    hellaswag_data: str = Field("", description="HellaSwag's .jsonl, or llm.c's .bin of it; empty downloads the .jsonl")
    hellaswag_limit: int = Field(0, ge=0, description="ask its first so many questions only; 0 asks all")


class SampleConfig(Section):
    every: int = Field(0, ge=0, description="print a sample every so many steps, and after the last; 0 never")
    tokens: int = Field(64, ge=1, description="tokens of a sample")
    prompt: str = Field("", description="text that a sample continues; empty starts at the end-of-text token")
    temperature: float = Field(1.0, ge=0, description="softmax temperature; 0 takes the most likely token")
    top_k: int = Field(0, ge=0, description="draw among the k most likely tokens; 0 among all")


class CheckpointConfig(Section):
    every: int = Field(0, ge=0, description="save every so many steps; the last is always saved")
    keep: int = Field(2, ge=0, description="newest checkpoints to keep; 0 keeps all")
    major: int = Field(0, ge=0, description="also keep those whose step is a multiple of this; 0 none")
    best: Literal["none", "val_loss"] = Field(
        "none", description="val_loss: also save after each lowest validation loss, and keep it; RUN/best names it"
    )


class LogConfig(Section):
    every: int = Field(1, ge=1, description="log every so many steps")
    main_log: Literal["none", "llmc"] = Field("none", description="llmc: also write main.log, in llm.c's format")
    stats_every: int = Field(
        0,
        ge=0,
        description="statistics of activations, gradients, updates every so many steps, and of the last; 0 never",
    )
    wandb: Literal["online", "offline", "disabled"] = Field(
        "disabled", description="mirror the metrics to Weights & Biases"
    )
    wandb_project: str = Field("gpt2_triton", min_length=1, description="Weights & Biases project")


class ParallelConfig(Section):
    gpus: OptionalInt = Field(None, ge=1, description="GPUs of the run; null is as many as torchrun starts, or 1")
    zero: int = Field(
        1,
        ge=0,
        le=2,
        description="ZeRO stage, what GPUs divide among them: 0 nothing, 1 AdamW's moments, 2 gradients too",
    )
    timeout: float = Field(
        100,
        gt=0,
        description="seconds without progress after which a hung run ends; before the first step is over, 3 times that",
    )


class DebugConfig(Section):
    hash_state: int = Field(
        0,
        ge=0,
        description="compare the weights of all GPUs, and AdamW's state at ZeRO stage 0, every so many steps; 0 never",
    )
