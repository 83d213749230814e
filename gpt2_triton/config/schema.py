"""Every key of the configuration: type, limits, default and meaning.  The
defaults are the recipe gpt2_124m.

Values may be strings, as overrides are; pydantic parses them.  A rule about one key stands in its
declaration or in values.py; a rule between keys stands in rules.py.  A resumed run may change
`free` keys.  It must keep the values of `kept` keys: with others it would be a new run.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from gpt2_triton.config.values import (
    RECOMPUTE_LEVELS,
    SIZES,
    check_mixture,
    check_recompute,
    check_tokenizer,
    keys_of_size,
    whole_number,
)

# padded_vocab is a multiple of it, so that the head's matmuls have whole tiles
VOCAB_MULTIPLE = 128

# On the command line every value is a string, so `null` stands for "not given", as in YAML.
NullIsNone = BeforeValidator(lambda value: None if value == "null" else value)
OptionalInt = Annotated[int | None, NullIsNone]
OptionalFloat = Annotated[float | None, NullIsNone]
OptionalText = Annotated[str | None, NullIsNone]
Patterns = Annotated[str, BeforeValidator(check_mixture)]
TokenizerName = Annotated[str, AfterValidator(check_tokenizer)]
Tags = Annotated[
    str | None,
    BeforeValidator(lambda value: ",".join(map(str, value)) if isinstance(value, list) else value),
    NullIsNone,
]
NothingIsNone = BeforeValidator(lambda value: "none" if value == "" else value)


def free(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare a key that a resumed run may change; `limits` are pydantic's."""
    return Field(default, description=meaning, **limits)


def kept(
    default: Any,
    meaning: str,
    arch: str = "",
    fp8: bool = True,
    formats: tuple[str, ...] = ("hf", "llmc"),
    **limits: Any,
) -> Any:
    """Declare a key that a resumed run keeps; a run from before the key existed had its default.

    Another value than the default goes only with model.arch `arch` ("": with all), with
    train.precision fp8 if `fp8`, and into exports of these `formats`.  From this follow refusals,
    train.precision auto, resume, export and the key's help.
    """
    goes_with: JsonDict = {"arch": arch, "fp8": fp8, "formats": list(formats)}
    described = f"{arch}: {meaning}" if arch else meaning
    return Field(default, description=described, json_schema_extra=goes_with, **limits)


class Choice(NamedTuple):
    """A value of a kept key of a model other than its default, and what it goes with."""

    key: str
    value: Any
    arch: str
    fp8: bool
    formats: list[str]


def choices(model: "ModelConfig") -> Iterator[Choice]:
    """Yield what a model's configuration chooses."""
    for key, field in type(model).model_fields.items():
        value = getattr(model, key)
        goes_with: Any = field.json_schema_extra
        if goes_with and value != field.default:
            yield Choice(f"model.{key}", value, **goes_with)


class ConfigSection(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Base class of the sections: frozen; refuse unknown keys, infinities and stray
    booleans; read 10B as an int.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _as_declared(cls, value: Any, info: ValidationInfo) -> Any:
        declared = cls.model_fields[info.field_name].annotation if info.field_name else None
        # pydantic takes true as 1, and YAML reads off as false
        if isinstance(value, bool) and declared is not bool:
            raise ValueError(
                "must not be a boolean (YAML reads yes, no, on and off as booleans; quote the word)"
            )
        if isinstance(value, str) and int in (declared, *get_args(declared)):
            number = whole_number(value)
            return value if number is None else number
        return value


class ConflictError(ValueError):
    """Keys contradict each other; `problems` holds (key, message) pairs."""

    def __init__(self, problems: list[tuple[str, str]]):
        self.problems = problems
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))


class ModelConfig(ConfigSection):
    size: str | None = kept(
        None,
        "sizes by name: llm.c's d6 to d84 and gpt3:c384 to gpt3:c12288, "
        "llama:c768, llama:1b, llama:3b, llama:8b, qwen3:0.6b, qwen3:1.7b",
        exclude=True,
    )
    arch: Literal["gpt2", "llama"] = kept(
        "gpt2", "architecture; llama is Llama 3's and Qwen3's", formats=("hf",)
    )
    n_layer: int = kept(12, "transformer layers", ge=1, le=256)
    n_head: int = kept(
        12,
        "attention heads; n_embd / n_head is 64, 80, 96 or 128, of llama 64 or 128",
        ge=1,
        le=4096,
    )
    n_kv_head: OptionalInt = kept(
        None, "heads of keys and values, which divide n_head; null is n_head", "llama", ge=1
    )
    head_dim: OptionalInt = kept(
        None, "columns of a head, 64 or 128; null is n_embd / n_head", "llama", ge=1
    )
    n_embd: int = kept(768, "channels of the residual stream", ge=1, le=1 << 17, multiple_of=16)
    n_inner: OptionalInt = kept(
        None, "width of the MLP; null is 4 * n_embd", "llama", ge=1, le=1 << 19, multiple_of=16
    )
    vocab_size: int = kept(
        50257, "tokens in the vocabulary; shards hold more than 65536 in 32 bits", ge=2, le=1 << 18
    )
    block_size: int = kept(
        1024, "longest sequence: rows of the position embedding", ge=1, le=1 << 24
    )
    dropout: float = kept(
        0.0,
        "probability that training sets an element of embeddings and branches to 0",
        "gpt2",
        ge=0,
        lt=1,
    )
    activation: Literal["gelu", "relu2"] = kept(
        "gelu", "the MLP's; relu2 is ReLU squared", "gpt2", fp8=False, formats=("hf",)
    )
    norm_eps: float = kept(1e-5, "epsilon of the norms", "llama", gt=0)
    qk_norm: bool = kept(
        False,
        "RMSNorm of each head of q and k before its rotation, with weights, as in Qwen3",
        "llama",
        formats=("hf",),
    )
    logit_cap: float = kept(
        0.0,
        "C > 0 makes a logit z of the output head C * tanh(z / C); 0 leaves it",
        "llama",
        ge=0,
        formats=("hf",),
    )
    rope_theta: float = kept(500_000.0, "base of the rotations' frequencies", "llama", gt=1)
    rope_factor: float = kept(
        1.0, "divisor of the low frequencies: 8 in Llama 3.1, 32 in 3.2, 1 for none", "llama", ge=1
    )
    tied: bool = kept(
        True, "the output head is the token embedding; false gives it weights of its own", "llama"
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_size(cls, values: Any) -> Any:
        """Replace `size` by its keys; only block_size may have another value beside it."""
        if not isinstance(values, dict) or values.get("size") in (None, "null"):
            return values
        size = values["size"]
        given = {key: value for key, value in values.items() if key != "size"}
        if size not in SIZES:
            raise ConflictError(
                [("model.size", f"unknown size {size}; known are {', '.join(SIZES)}")]
            )
        known = keys_of_size(size)
        for key in known:
            if key != "block_size" and str(given.get(key, known[key])) != str(known[key]):
                wrong = f"{size} has {key} {known[key]}, but {key} is {given[key]}"
                raise ConflictError([("model.size", f"{wrong}; remove one")])
        return known | given

    @property
    def head_size(self) -> int:
        """Columns of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def q_channels(self) -> int:
        """Columns of the queries, and of the attention's output."""
        return self.head_size * self.n_head

    @property
    def kv_channels(self) -> int:
        """Columns of the keys, and of the values."""
        return self.head_size * (self.n_kv_head or self.n_head)

    @property
    def inner(self) -> int:
        """Columns of the MLP's activation."""
        return self.n_inner or 4 * self.n_embd

    @property
    def padded_vocab(self) -> int:
        """Rows of the token embedding: a multiple of VOCAB_MULTIPLE, the last ones of no token."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_row(self) -> int:
        """First row of the output head, counted from the token embedding's first: an
        untied head lies behind it.
        """
        return 0 if self.tied else self.padded_vocab


class DataConfig(ConfigSection):
    # The data may move: a resume compares its content by fingerprint.
    train: Patterns = free(
        "data/fineweb10B/train_*.bin",
        "training shards: path, pattern or builtin, names of Unicode's characters; several "
        "sources as PATTERN=WEIGHT,... or, in YAML, a list of {path, weight}",
        min_length=1,
    )
    val: Patterns = free(
        "data/fineweb10B/val_*.bin", "validation shards, as data.train", min_length=1
    )
    tokenizer: TokenizerName = kept(
        "gpt2",
        "tokenizer of the shards and of samples: gpt2, llama3, bytes, a Hugging Face "
        "tokenizer.json or its folder, or nanoGPT's meta.pkl; FOLDER#TOKEN names the token that "
        "ends a text",
    )
    seed: int = kept(42, "seed of the order of samples", ge=0, lt=2**62)
    windows: Literal["fixed", "shifted"] = kept(
        "fixed",
        "fixed: training sequences begin every seq_len tokens; shifted: "
        "they begin elsewhere in each epoch",
    )
    allow_changed: bool = free(
        False, "true: resume on other data than the checkpoint's, and record what differs"
    )


class TrainConfig(ConfigSection):
    steps: int = free(19560, "optimizer steps", ge=1, le=1 << 40)
    # The micro-batch may change, since the tokens of a step may not.
    batch_size: int = free(
        64, "largest micro-batch, in sequences; larger steps accumulate gradients", ge=1, le=1 << 20
    )
    seq_len: int = kept(1024, "tokens of a training sequence", ge=1, le=1 << 24)
    total_batch_tokens: OptionalInt = kept(
        524_288,
        "tokens of a step, on all GPUs together; null is batch_size * seq_len",
        ge=1,
        le=1 << 40,
    )
    dtype: Literal["bf16", "fp32"] = kept("bf16", "storage of parameters and activations")
    precision: Literal["auto", "bf16", "fp8"] = free(
        "bf16",
        "operands of matrix products; fp8 needs dtype bf16, and compute capability 8.9 or "
        "newer, gfx950 or a CPU; auto is fp8 for model.arch gpt2 on Hopper, else bf16",
    )
    seed: int = kept(
        42, "seed of the initial weights, of stochastic rounding and of dropout", ge=0, lt=2**62
    )
    max_minutes: float = free(
        0, "minutes until the run saves and ends with the file PREEMPTED; 0 never", ge=0
    )
    patience: int = free(
        0, "end the run after this many validations in a row without a lower loss; 0 never", ge=0
    )
    skip_limit: int = free(
        10, "stop after this many non-finite steps in a row; 0 never stops", ge=0
    )
    skip_loss_z: float = free(
        0,
        "skip a step if its loss is so many standard deviations above the mean of 128; 0 never",
        ge=0,
        le=11,
    )
    skip_norm_z: float = free(0, "like skip_loss_z, for the gradient norm", ge=0, le=11)
    rewind_after: int = free(
        0,
        "after this many skipped steps in a row go back to a checkpoint "
        "and leave out the data since; 0 never",
        ge=0,
    )

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all GPUs together."""
        return self.total_batch_tokens or self.batch_size * self.seq_len

    @property
    def step_sequences(self) -> int:
        """Sequences of a step, on all GPUs together."""
        return self.step_tokens // self.seq_len


class Fp8Config(ConfigSection):
    keep_bf16: Annotated[Literal["head", "none"], NothingIsNone] = free(
        "none",
        "what train.precision fp8 leaves in bf16; head: products of the logits and their gradients",
    )


class OptimConfig(ConfigSection):
    name: Literal["adamw", "muon"] = kept(
        "adamw", "optimizer of the layers' matrices; all else has AdamW"
    )
    lr: float = free(6e-4, "peak learning rate", gt=0)
    embed_lr: float = free(
        1.0, "factor on the learning rate of the embeddings and an untied head", gt=0
    )
    adamw_lr: OptionalFloat = free(
        None, "peak learning rate of AdamW beside Muon, before embed_lr; null is lr", gt=0
    )
    warmup: int = free(700, "steps of linear warmup", ge=0)
    schedule: Literal["cosine", "linear", "constant", "wsd", "trapezoid"] = free(
        "cosine", "learning rate after warmup"
    )
    final_frac: float = free(
        0.0, "learning rate at the end, as a fraction of lr; constant ignores it", ge=0, le=1
    )
    wsd_decay_frac: float = free(
        0.2, "fraction of steps in which wsd (by 1 - sqrt) and trapezoid decay", gt=0, le=1
    )
    beta1: float = free(0.9, "decay of AdamW's first moment", ge=0, lt=1)
    beta2: float = free(0.95, "decay of AdamW's second moment", ge=0, lt=1)
    eps: float = free(1e-8, "AdamW's epsilon", gt=0)
    momentum: float = free(0.95, "decay of Muon's momentum", ge=0, lt=1)
    weight_decay: OptionalFloat = free(
        0.1, "decoupled weight decay of matrices and embeddings; null with tau", ge=0
    )
    embed_decay: OptionalFloat = free(
        None, "decay of embeddings and an untied head; null as for matrices", ge=0
    )
    tau: OptionalFloat = free(
        None, "lr * weight_decay * train.steps: sets weight_decay for any number of steps", ge=0
    )
    clip: float = free(1.0, "largest global norm of the gradient; 0 does not clip", ge=0)
    master: Literal["none", "fp32"] = kept(
        "none", "none: bf16 weights, rounded stochastically; fp32: fp32 weights"
    )
    m: Literal["fp32", "bf16"] = kept(
        "fp32", "storage of AdamW's first moment and Muon's momentum; bf16 as in optim.v"
    )
    v: Literal["fp32", "bf16"] = kept(
        "fp32", "storage of AdamW's second moment; bf16 is rounded stochastically"
    )

    @model_validator(mode="before")
    @classmethod
    def _tau_replaces_weight_decay(cls, given: Any) -> Any:
        has_tau = isinstance(given, dict) and given.get("tau") not in (None, "null")
        return {"weight_decay": None} | given if has_tau else given


class MemoryConfig(ConfigSection):
    recompute: Annotated[str, AfterValidator(check_recompute)] = free(
        "auto",
        "what the backward pass recomputes: "
        f"{', '.join(RECOMPUTE_LEVELS)}; gelu+ln:4 is gelu+ln in "
        "the first 4 layers, gelu in the others; auto takes the first that "
        "fits; act and norm also name gelu and ln",
    )
    head_rows: OptionalInt = free(
        None, "rows of logits computed at once; null is 10112 to 16384, by n_embd", ge=1
    )


class EvalConfig(ConfigSection):
    every: int = free(250, "steps between validations; also after the last step; 0 never", ge=0)
    tokens: int = free(10_485_760, "validation tokens, the same each time; 0 takes all", ge=0)
    hellaswag_every: int = free(
        0, "steps between HellaSwag runs; also after the last step; 0 never", ge=0
    )
    hellaswag_data: str = free("", "HellaSwag's .jsonl; empty downloads it")
    hellaswag_limit: int = free(0, "number of questions, from the first on; 0 takes all", ge=0)


class SampleConfig(ConfigSection):
    every: int = free(0, "steps between printed samples; also after the last step; 0 never", ge=0)
    tokens: int = free(64, "most tokens of a sample, which stops at the end of text", ge=1)
    prompt: str = free("", "text that a sample continues; empty starts at the end-of-text token")
    temperature: float = free(1.0, "softmax temperature; 0 takes the most likely token", ge=0)
    top_k: int = free(0, "draw among the k most likely tokens; 0 among all", ge=0)


class CheckpointConfig(ConfigSection):
    every: int = free(
        1000, "steps between checkpoints; the last step is always saved; 0 saves it alone", ge=0
    )
    keep: int = free(2, "newest checkpoints to keep; 0 keeps all", ge=0)
    major: int = free(0, "also keep each step that is a multiple of this; 0 none", ge=0)
    best: Literal["none", "val_loss"] = free(
        "none", "val_loss: also save each lowest validation loss, as RUN/best"
    )


class LogConfig(ConfigSection):
    every: int = free(1, "steps between logged steps", ge=1)
    stats_every: int = free(
        0, "steps between statistics of tensors; also of the last step; 0 never", ge=0
    )
    wandb: Literal["online", "offline", "disabled"] = free(
        "disabled", "send the metrics to Weights & Biases"
    )
    # wandb's variables win over these keys
    wandb_project: OptionalText = free(
        None, "W&B project, or $WANDB_PROJECT; null is gpt2_triton", min_length=1
    )
    wandb_name: OptionalText = free(
        None, "name of the W&B run, or $WANDB_NAME; null is the run directory's"
    )
    wandb_entity: OptionalText = free(
        None, "W&B user or team, or $WANDB_ENTITY; null is the account's own"
    )
    wandb_group: OptionalText = free(None, "group of W&B runs, or $WANDB_RUN_GROUP; null is none")
    wandb_tags: Tags = free(
        None, "tags of the W&B run, as a,b or [a, b], or $WANDB_TAGS; null is none"
    )


class ParallelConfig(ConfigSection):
    gpus: OptionalInt = free(
        None, "GPUs of the run; null is as many as torchrun starts, or 1", ge=1
    )
    zero: int = free(
        1,
        "ZeRO: GPUs shard nothing (0), the optimizer's moments (1), or gradients too (2)",
        ge=0,
        le=2,
    )
    timeout: float = free(
        100, "seconds without progress that end a run; three times as many in the first step", gt=0
    )


class DebugConfig(ConfigSection):
    hash_state: int = free(
        0, "steps between comparisons of all GPUs' weights, and moments at ZeRO 0; 0 never", ge=0
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
    init_from: str = free(
        "scratch", "weights: scratch, checkpoint:DIR, hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE"
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
    """Return whether a resumed run may have another value of this dotted key;
    False for an unknown key.
    """
    field = dict(options()).get(key)
    return field is not None and field.json_schema_extra is None  # only kept() gives one
