"""Every key of the configuration: type, limits, default (llm.c's recipe for GPT-2 124M on FineWeb) and meaning.

Values may be strings, as overrides are; pydantic parses them.  A rule about one key stands in its declaration, or in
values.py if its values have a form of their own; a rule between keys in rules.py.  A resumed run may not change a key
marked KEPT: with another value it would be another run.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from gpt2_triton.config.values import (
    RECOMPUTE_LEVELS,
    SIZE_KEYS,
    SIZES,
    check_recompute,
)

VOCAB_MULTIPLE = 128  # padded_vocab: whole tiles for the head's products
KEPT: JsonDict = {"resume": "kept"}

# On the command line every value is a string, so `null` stands for "not given", as in YAML.
OptionalInt = Annotated[int | None, BeforeValidator(lambda value: None if value == "null" else value)]
NothingIsNone = BeforeValidator(lambda value: "none" if value == "" else value)


class ConfigSection(BaseModel):
    """Base class of the sections: frozen, without unknown keys or infinities, booleans only where declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        declared = cls.model_fields[info.field_name].annotation if info.field_name else None
        if isinstance(value, bool) and declared is not bool:  # pydantic takes true as 1, and YAML reads off as false
            raise ValueError("must not be a boolean (YAML reads yes, no, on and off as booleans; quote the word)")
        return value


class ConflictError(ValueError):
    """Fields that are each valid but contradict each other: `problems` holds (key, message) pairs."""

    def __init__(self, problems: list[tuple[str, str]]):
        self.problems = problems
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))


class ModelConfig(ConfigSection):
    size: str | None = Field(
        None,
        exclude=True,
        description="llm.c's name, d6 to d84 or gpt3:c384 to gpt3:c12288, for layers, heads, channels, block_size",
        json_schema_extra=KEPT,
    )
    n_layer: int = Field(12, ge=1, le=256, description="transformer layers", json_schema_extra=KEPT)
    n_head: int = Field(
        12, ge=1, le=4096, description="attention heads; n_embd / n_head is 64, 80, 96 or 128", json_schema_extra=KEPT
    )
    n_embd: int = Field(
        768, ge=1, le=1 << 17, multiple_of=16, description="channels of the residual stream", json_schema_extra=KEPT
    )
    vocab_size: int = Field(
        50257, ge=2, le=65536, description="tokens in the vocabulary; shards hold 16-bit tokens", json_schema_extra=KEPT
    )
    block_size: int = Field(
        1024, ge=1, le=1 << 24, description="longest sequence: rows of the position embedding", json_schema_extra=KEPT
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_size(cls, values: Any) -> Any:
        """Replace `size` by the keys it stands for; only block_size may be given next to it with another value."""
        if not isinstance(values, dict) or values.get("size") in (None, "null"):
            return values
        size, given = values["size"], {key: value for key, value in values.items() if key != "size"}
        if size not in SIZES:
            raise ConflictError([("model.size", f"unknown size {size}; known are {', '.join(SIZES)}")])
        known = dict(zip(SIZE_KEYS, SIZES[size], strict=True))
        for key in SIZE_KEYS[:3]:
            if str(given.get(key, known[key])) != str(known[key]):
                wrong = f"{size} has {key} {known[key]}, but {key} is {given[key]}; remove one"
                raise ConflictError([("model.size", wrong)])
        return known | given

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class DataConfig(ConfigSection):
    # The data may move: a resume compares its content by fingerprint.
    train: str = Field(
        "data/fineweb10B/train_*.bin", min_length=1, description="training shards: path, pattern or builtin"
    )
    val: str = Field(
        "data/fineweb10B/val_*.bin", min_length=1, description="validation shards: path, pattern or builtin"
    )
    tokenizer: Literal["gpt2", "bytes"] = Field(
        "gpt2", description="tokenizer of the shards and of samples", json_schema_extra=KEPT
    )
    seed: int = Field(42, ge=0, lt=2**62, description="seed of the order of samples", json_schema_extra=KEPT)
    allow_changed: bool = Field(
        False, description="true: resume on other data than the checkpoint's, and record what differs"
    )
    verify: bool = Field(
        False, description="true: at the start compare the sha256 of every shard with shards.json next to it"
    )


class TrainConfig(ConfigSection):
    steps: int = Field(19560, ge=1, le=1 << 40, description="optimizer steps")
    # The micro-batch may change, since the tokens of a step may not.
    batch_size: int = Field(
        64,
        ge=1,
        le=1 << 20,
        description="largest micro-batch of a GPU, in sequences; a larger step accumulates gradients",
    )
    seq_len: int = Field(1024, ge=1, le=1 << 24, description="tokens of a training sequence", json_schema_extra=KEPT)
    total_batch_tokens: OptionalInt = Field(
        None, ge=1, le=1 << 40, description="tokens of a step; null is batch_size * seq_len", json_schema_extra=KEPT
    )
    dtype: Literal["bf16", "fp32"] = Field(
        "bf16", description="storage of parameters and activations", json_schema_extra=KEPT
    )
    precision: Literal["bf16", "fp8"] = Field(
        "bf16",
        description="operands of the layers' products; fp8 needs dtype bf16 and compute capability >= 8.9, "
        "gfx950 or no GPU",
    )
    seed: int = Field(
        42, ge=0, lt=2**62, description="seed of the initial weights and of stochastic rounding", json_schema_extra=KEPT
    )
    max_minutes: float = Field(
        0,
        ge=0,
        description="minutes from the start of the program until it has saved and ended, with exit code 0 and "
        "PREEMPTED in the run directory; 0 no limit",
    )
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

    @property
    def step_tokens(self) -> int:
        return self.total_batch_tokens or self.batch_size * self.seq_len


class Fp8Config(ConfigSection):
    keep_bf16: Annotated[Literal["head", "none"], NothingIsNone] = Field(
        "head",
        description="what train.precision fp8 leaves in bf16: head, the product that gives the logits, or none",
    )


class OptimConfig(ConfigSection):
    name: Literal["adamw", "muon"] = Field(  # decides which moments a checkpoint has
        "adamw",
        description="optimizer of the layers' matrices; embeddings, norms and biases have AdamW with either",
        json_schema_extra=KEPT,
    )
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    embed_lr: float = Field(1.0, gt=0, description="factor on the learning rate of the embeddings, wte and wpe")
    warmup: int = Field(700, ge=0, description="steps of linear warmup")
    schedule: Literal["cosine", "linear", "constant", "wsd", "trapezoid"] = Field(
        "cosine", description="learning rate after the warmup"
    )
    final_frac: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a fraction of lr")
    wsd_decay_frac: float = Field(
        0.2, gt=0, le=1, description="fraction of the steps over which the schedules wsd and trapezoid decay"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of AdamW's second moment")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    momentum: float = Field(0.95, ge=0, lt=1, description="decay of Muon's momentum")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay of matrices and embeddings")
    clip: float = Field(1.0, ge=0, description="largest global norm of the gradient; 0 does not clip")
    master: Literal["none", "fp32"] = Field(  # decides which tensors a checkpoint has
        "none",
        description="none: bf16 weights, rounded stochastically; fp32: 16 more bits of each weight",
        json_schema_extra=KEPT,
    )
    v: Literal["fp32", "bf16"] = Field(  # the dtype of a tensor of checkpoints
        "fp32",
        description="AdamW's second moment; bf16, rounded stochastically, takes 2 bytes a parameter less",
        json_schema_extra=KEPT,
    )


class MemoryConfig(ConfigSection):
    recompute: Annotated[str, AfterValidator(check_recompute)] = Field(
        "gelu",
        description=f"what the backward pass recomputes: {', '.join(RECOMPUTE_LEVELS)}; gelu+ln:4 is gelu+ln in "
        "the first 4 layers, gelu in the others; auto takes the first that fits",
    )
    head_rows: OptionalInt = Field(
        None, ge=1, description="rows of logits at once; null is 11264 up to n_embd 768, 16384 up to 1024, else 10112"
    )


class EvalConfig(ConfigSection):
    every: int = Field(250, ge=0, description="steps between validations; also after the last step; 0 never")
    tokens: int = Field(10_485_760, ge=0, description="validation tokens, the same each time; 0 takes all")
    hellaswag_every: int = Field(0, ge=0, description="steps between HellaSwag runs; also after the last step; 0 never")
    hellaswag_data: str = Field("", description="HellaSwag's .jsonl, or llm.c's .bin of it; empty downloads the .jsonl")
    hellaswag_limit: int = Field(0, ge=0, description="number of questions, from the first on; 0 takes all")


class SampleConfig(ConfigSection):
    every: int = Field(0, ge=0, description="steps between printed samples; also after the last step; 0 never")
    tokens: int = Field(64, ge=1, description="tokens of a sample")
    prompt: str = Field("", description="text that a sample continues; empty starts at the end-of-text token")
    temperature: float = Field(1.0, ge=0, description="softmax temperature; 0 takes the most likely token")
    top_k: int = Field(0, ge=0, description="draw among the k most likely tokens; 0 among all")


class CheckpointConfig(ConfigSection):
    every: int = Field(0, ge=0, description="steps between checkpoints; the last step is always saved")
    keep: int = Field(2, ge=0, description="newest checkpoints to keep; 0 keeps all")
    major: int = Field(0, ge=0, description="also keep those whose step is a multiple of this; 0 none")
    best: Literal["none", "val_loss"] = Field(
        "none", description="val_loss: also save after each lowest validation loss, and keep it; RUN/best names it"
    )


class LogConfig(ConfigSection):
    every: int = Field(1, ge=1, description="steps between logged steps")
    main_log: Literal["none", "llmc"] = Field("none", description="llmc: also write main.log, in llm.c's format")
    stats_every: int = Field(
        0,
        ge=0,
        description="steps between statistics of activations, gradients and updates; also of the last step; 0 never",
    )
    wandb: Literal["online", "offline", "disabled"] = Field(
        "disabled", description="send the metrics to Weights & Biases"
    )
    wandb_project: str = Field("gpt2_triton", min_length=1, description="Weights & Biases project")


class ParallelConfig(ConfigSection):
    gpus: OptionalInt = Field(None, ge=1, description="GPUs of the run; null is as many as torchrun starts, or 1")
    zero: int = Field(
        1,
        ge=0,
        le=2,
        description="ZeRO stage: GPUs shard nothing (0), the optimizer's moments (1), or gradients too (2)",
    )
    timeout: float = Field(
        100,
        gt=0,
        description="seconds without progress after which a hung run ends; until the first step ends, 3 times that",
    )


class DebugConfig(ConfigSection):
    hash_state: int = Field(
        0, ge=0, description="steps between comparisons of all GPUs' weights, and moments at ZeRO stage 0; 0 never"
    )


class Sections(ConfigSection):
    """Every key, in sections."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    fp8: Fp8Config = Fp8Config()
    memory: MemoryConfig = MemoryConfig()
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    parallel: ParallelConfig = ParallelConfig()
    debug: DebugConfig = DebugConfig()
    init_from: str = Field(
        "scratch", description="initial weights: scratch, checkpoint:DIR, hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE"
    )


def options() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key, dotted as on the command line, with its field."""
    for name, field in Sections.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, ConfigSection):
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field


def may_change_on_resume(key: str) -> bool:
    """Return whether a resumed run may have another value of this dotted key; False for an unknown key."""
    field = dict(options()).get(key)
    return field is not None and field.json_schema_extra != KEPT
