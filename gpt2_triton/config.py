"""The configuration: a typed, frozen tree, and the only place with defaults (llm.c's recipe for GPT-2 124M on FineWeb).

configfile.py reads it from YAML and the command line.  Values may be strings, as overrides are; pydantic reads the
numbers in them.  What a field can check by itself stands in its declaration; `disagreements` has the rules between
fields.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

HEAD_SIZES = (64, 80, 96, 128)  # what the attention kernels are written and tested for
TOKENIZER_SIZES = {"gpt2": 50257, "bytes": 256}
VOCAB_MULTIPLE = 128  # padded_vocab: whole tiles for the head's products
INIT_SOURCES = {"checkpoint": "DIR", "hf": "DIR_OR_NAME", "llmc": "FILE", "nanogpt": "FILE"}  # init_from, but scratch


class ConfigError(ValueError):
    """A mistake in the configuration or on the command line; one line per mistake."""


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
            raise Disagreement([("model.size", f"unknown size {size}; known are {', '.join(SIZES)}")])
        known = dict(zip(SIZE_KEYS, SIZES[size], strict=True))
        for key in SIZE_KEYS[:3]:
            if str(given.get(key, known[key])) != str(known[key]):
                wrong = f"{size} has {key} {known[key]}, and {key} says {given[key]}; remove one"
                raise Disagreement([("model.size", wrong)])
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


class MemoryConfig(Section):
    recompute: Literal["auto", "none", "gelu", "gelu+ln", "gelu+ln+qkv", "block"] = Field(
        "gelu", description="what the backward pass computes again; auto takes the first of the others that fits"
    )
    head_rows: OptionalInt = Field(
        None, ge=1, description="rows of logits at once; null is 11264 up to n_embd 768, 16384 up to 1024, else 8192"
    )


class EvalConfig(Section):
    every: int = Field(250, ge=0, description="validate every so many steps, and after the last; 0 never")
    tokens: int = Field(10_485_760, ge=1, description="validation tokens, the same ones each time")
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
    hash_state: int = Field(0, ge=0, description="compare the weights of all GPUs every so many steps; 0 never")


class Config(Section):
    """All of a run.  Derived sizes are properties, so that each formula stands once."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
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

    @property
    def head_rows(self) -> int:
        """Rows of logits at once.  By default a buffer of 0.8 to 1.6 GiB at GPT-2's vocabulary, and tiles of dX that
        fill 132 multiprocessors two (n_embd 768) or almost four times (1024).
        """
        if self.memory.head_rows:
            return self.memory.head_rows
        return 11264 if self.model.n_embd <= 768 else 16384 if self.model.n_embd <= 1024 else 8192

    @property
    def total_batch_tokens(self) -> int:
        return self.train.total_batch_tokens or self.train.batch_size * self.train.seq_len

    # processes of this run, each with a GPU; no key, so that a run may go on with others
    _started: int = PrivateAttr(1)

    @property
    def gpus(self) -> int:
        return self.parallel.gpus or self._started

    @property
    def zero(self) -> int:
        """The ZeRO stage in use: one GPU has nothing to share."""
        return self.parallel.zero if self.gpus > 1 else 0

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward and backward pass: batch_size, or all of a GPU's share of the step when fewer."""
        return min(self.train.batch_size, self.total_batch_tokens // self.train.seq_len // self.gpus)

    @property
    def accumulation(self) -> int:
        return self.total_batch_tokens // (self.gpus * self.micro_batch * self.train.seq_len)

    @property
    def n_params(self) -> int:
        """All parameters as llm.c counts them: padded vocabulary and wpe included, the head once, since it is wte."""
        c, layers = self.model.n_embd, self.model.n_layer
        layer = 12 * c * c + 13 * c  # matrices 3 + 1 + 4 + 4; biases 3 + 1 + 4 + 1, two norms of 2 each
        return (self.model.padded_vocab + self.model.block_size) * c + layers * layer + 2 * c

    def replace(self, **sections: dict[str, Any]) -> "Config":
        """A copy with other values, which are not checked: replace(memory={"recompute": "gelu"})."""
        copies = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=copies)

    def with_gpus(self, gpus: int) -> "Config":
        """The configuration of a run on so many GPUs; ConfigError if it says another number or does not divide."""
        if self.parallel.gpus not in (None, gpus):
            raise ConfigError(
                f"parallel.gpus: {self.parallel.gpus}, but {gpus} started; start as many, or leave it out"
            )
        out = self.model_copy()
        out._started = gpus
        if problems := list(disagreements(out)):
            raise ConfigError("\n".join(f"{key}: {message}" for key, message in problems))
        return out

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @model_validator(mode="after")
    def _fields_agree(self, info: ValidationInfo) -> "Config":
        """On as many GPUs as the context says: a batch that divides on 8 need not on one."""
        if info.context:
            self._started = info.context["gpus"]
        if problems := list(disagreements(self)):
            raise Disagreement(problems)
        return self


class Disagreement(ValueError):
    """Fields that are each valid and do not go together: (key, message) pairs."""

    def __init__(self, problems: list[tuple[str, str]]):
        self.problems = problems
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))


def disagreements(config: Config) -> Iterator[tuple[str, str]]:
    """Every rule between fields that this configuration breaks, as (key, message)."""
    m, d, t, o, e = config.model, config.data, config.train, config.optim, config.eval
    if m.n_embd % m.n_head:
        yield "model.n_head", f"{m.n_head} heads do not divide n_embd {m.n_embd}; {_fitting_heads(m.n_embd)}"
    elif m.n_embd // m.n_head not in HEAD_SIZES:
        wrong = f"head size n_embd / n_head is {m.n_embd // m.n_head}, not one of {HEAD_SIZES}"
        yield "model.n_head", f"{wrong}; {_fitting_heads(m.n_embd)}"
    if t.seq_len > m.block_size:
        longer = f"{t.seq_len} is longer than model.block_size {m.block_size}"
        yield "train.seq_len", f"{longer}; lower it or raise the other"
    if m.vocab_size < TOKENIZER_SIZES[d.tokenizer]:
        expected = f"the {d.tokenizer} tokenizer has {TOKENIZER_SIZES[d.tokenizer]} tokens"
        yield "model.vocab_size", f"{expected}, got {m.vocab_size}; set model.vocab_size or data.tokenizer"
    if (d.train == "builtin") != (d.val == "builtin"):
        yield "data.val", f"data.train is {d.train} and data.val is {d.val}; make both builtin, or neither"
    if o.master == "fp32" and t.dtype == "fp32":
        yield "optim.master", "fp32 parameters are their own master copies; set it to none, or train.dtype to bf16"
    if o.warmup > t.steps:
        yield "optim.warmup", f"{o.warmup} steps of warmup are more than train.steps {t.steps}; lower it"
    if e.every and e.tokens < t.seq_len:
        yield "eval.tokens", f"{e.tokens} is less than train.seq_len {t.seq_len}; raise it or set eval.every to 0"
    source, _, path = config.init_from.partition(":")
    if config.init_from != "scratch" and not (source in INIT_SOURCES and path):
        known = ", ".join(f"{name}:{what}" for name, what in INIT_SOURCES.items())
        yield "init_from", f"expected scratch or one of {known}; got {config.init_from}"
    saved = config.checkpoint.every
    if t.rewind_after and not saved:
        yield "train.rewind_after", "there is no checkpoint to go back to; set checkpoint.every, or this to 0"
    elif t.rewind_after > saved:
        yield "train.rewind_after", f"{t.rewind_after} is more than checkpoint.every {saved}; lower it"
    if config.log.stats_every and config.gpus > 1:
        yield "log.stats_every", "statistics are of one GPU's tensors; set it to 0, or run on one GPU"
    yield from _batch_disagreements(t, config.gpus)


def _batch_disagreements(t: TrainConfig, gpus: int) -> Iterator[tuple[str, str]]:
    total, several = t.total_batch_tokens or t.batch_size * t.seq_len, f"{gpus} GPUs" if gpus > 1 else ""
    rows, rest = divmod(total, t.seq_len * gpus)  # of each GPU
    if rest:
        fitting = " or ".join(str(n * t.seq_len * gpus) for n in (rows, rows + 1) if n)
        unit = f"train.seq_len {t.seq_len}{several and ' times '}{several}"
        yield "train.total_batch_tokens", f"{total} is no multiple of {unit}; set it to {fitting}"
    elif rows % min(t.batch_size, rows):
        best = max(b for b in range(1, t.batch_size) if rows % b == 0)
        below = rows // t.batch_size * t.batch_size * t.seq_len * gpus
        step = f"a step of {rows * gpus} sequences{several and ' on '}{several} (total_batch_tokens {total})"
        wrong = f"{step} does not divide into batches of {t.batch_size}"
        yield "train.batch_size", f"{wrong}; set it to {best}, or total_batch_tokens to {below}"


def _fitting_heads(n_embd: int) -> str:
    fitting = [str(n_embd // size) for size in HEAD_SIZES if n_embd % size == 0]
    return f"set model.n_head to {' or '.join(fitting)}" if fitting else "set model.n_embd to a multiple of 64"


def options() -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the configuration, dotted as on the command line, with its field."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field
