"""The configuration of a run: a typed, frozen tree of sections.py, the sizes derived from it, the rules between keys.

configfile.py reads it from YAML and the command line.
"""

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from gpt2_triton.config import schema
from gpt2_triton.errors import ConfigError

HEAD_SIZES = (64, 80, 96, 128)  # what the attention kernels are written and tested for
TOKENIZER_SIZES = {"gpt2": 50257, "bytes": 256}
INIT_SOURCES = {"checkpoint": "DIR", "hf": "DIR_OR_NAME", "llmc": "FILE", "nanogpt": "FILE"}  # init_from, but scratch


class Config(schema.Section):
    """All of a run.  Derived sizes are properties, so that each formula stands once."""

    model: schema.ModelConfig = schema.ModelConfig()
    data: schema.DataConfig = schema.DataConfig()
    train: schema.TrainConfig = schema.TrainConfig()
    optim: schema.OptimConfig = schema.OptimConfig()
    memory: schema.MemoryConfig = schema.MemoryConfig()
    eval: schema.EvalConfig = schema.EvalConfig()
    sample: schema.SampleConfig = schema.SampleConfig()
    checkpoint: schema.CheckpointConfig = schema.CheckpointConfig()
    log: schema.LogConfig = schema.LogConfig()
    parallel: schema.ParallelConfig = schema.ParallelConfig()
    debug: schema.DebugConfig = schema.DebugConfig()
    init_from: str = Field(
        "scratch", description="initial weights: scratch, checkpoint:DIR, hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE"
    )

    @property
    def head_rows(self) -> int:
        """Rows of logits at once.  By default a buffer of 0.9 to 1.5 GiB at GPT-2's vocabulary, and tiles of dX that
        fill 132 multiprocessors two (n_embd 768), almost four (1024) or almost three times (1280, 1600).
        """
        if self.memory.head_rows:
            return self.memory.head_rows
        return 11264 if self.model.n_embd <= 768 else 16384 if self.model.n_embd <= 1024 else 10112

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

    @property
    def flops_per_token(self) -> int:
        """6N + 6*L*C*T, as llm.c counts, so that figures compare.

        N counts every parameter with wpe, biases, norms and the padded vocabulary; wte counts because it is the head.
        The second term is causal attention.  Recomputation in the backward pass is not counted.
        """
        return 6 * self.n_params + 6 * self.model.n_layer * self.model.n_embd * self.train.seq_len

    def replace(self, **changes: dict[str, Any]) -> "Config":
        """A copy with other values, which are not checked: replace(memory={"recompute": "gelu"})."""
        copies = {name: getattr(self, name).model_copy(update=values) for name, values in changes.items()}
        return self.model_copy(update=copies)

    def with_gpus(self, gpus: int) -> "Config":
        """The configuration of a run on so many GPUs; ConfigError if it says another number or does not divide."""
        if self.parallel.gpus not in (None, gpus):
            raise ConfigError(
                f"parallel.gpus: {self.parallel.gpus}, but {gpus} started; start as many, or leave it out"
            )
        out = self.model_copy()
        out._started = gpus
        if problems := list(conflicts(out)):
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
        if problems := list(conflicts(self)):
            raise schema.ConflictError(problems)
        return self


def conflicts(config: Config) -> Iterator[tuple[str, str]]:
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
    if e.every and 0 < e.tokens < t.seq_len:
        yield "eval.tokens", f"{e.tokens} is less than train.seq_len {t.seq_len}; raise it, or 0 takes all tokens"
    source, _, path = config.init_from.partition(":")
    if config.init_from != "scratch" and not (source in INIT_SOURCES and path):
        known = ", ".join(f"{name}:{what}" for name, what in INIT_SOURCES.items())
        yield "init_from", f"expected scratch or one of {known}; got {config.init_from}"
    recomputed = config.memory.recompute.partition(":")[2]
    if recomputed and int(recomputed) > m.n_layer:
        yield (
            "memory.recompute",
            f"{config.memory.recompute} is of more layers than model.n_layer {m.n_layer}; lower it",
        )
    if config.checkpoint.best == "val_loss" and not e.every:
        yield "checkpoint.best", "there is no validation loss to go by; set eval.every, or this to none"
    saved = config.checkpoint.every
    if t.rewind_after and not saved:
        yield "train.rewind_after", "there is no checkpoint to go back to; set checkpoint.every, or this to 0"
    elif t.rewind_after > saved:
        yield "train.rewind_after", f"{t.rewind_after} is more than checkpoint.every {saved}; lower it"
    yield from _batch_disagreements(t, config.gpus)


def _batch_disagreements(t: schema.TrainConfig, gpus: int) -> Iterator[tuple[str, str]]:
    total, several = t.total_batch_tokens or t.batch_size * t.seq_len, f"{gpus} GPUs" if gpus > 1 else ""
    rows, rest = divmod(total, t.seq_len * gpus)  # of each GPU
    if rest:
        fitting = " or ".join(str(n * t.seq_len * gpus) for n in (rows, rows + 1) if n)
        unit = f"train.seq_len {t.seq_len}{several and ' times '}{several}"
        todo = table = ""
        if gpus > 1 and total % t.seq_len == 0:
            near, table = _fitting_gpus(t, total // t.seq_len, gpus)
            todo = f"start {near} GPUs, or, in a new run, "
        yield "train.total_batch_tokens", f"{total} is no multiple of {unit}; {todo}set it to {fitting}{table}"
    elif rows % min(t.batch_size, rows):
        best = max(b for b in range(1, t.batch_size) if rows % b == 0)
        below = rows // t.batch_size * t.batch_size * t.seq_len * gpus
        step = f"a step of {rows * gpus} sequences{several and ' on '}{several} (total_batch_tokens {total})"
        wrong = f"{step} does not divide into batches of {t.batch_size}"
        yield "train.batch_size", f"{wrong}; set it to {best}, or, in a new run, total_batch_tokens to {below}"


def _fitting_gpus(t: schema.TrainConfig, sequences: int, gpus: int) -> tuple[str, str]:
    """The numbers next to this one that share out the sequences of a step, and a table of what each of up to three
    below and above would do: of a run that goes on, its tokens may not change.
    """
    each = {n: sequences // n for n in range(1, sequences + 1) if sequences % n == 0}
    batch = {n: min(t.batch_size, rows) for n, rows in each.items()}
    fits = [n for n in each if each[n] % batch[n] == 0]
    below, above = [n for n in fits if n < gpus][-3:], [n for n in fits if n > gpus][:3]
    table: list[tuple[Any, ...]] = [("GPUs", "sequences each", "at once", "micro-steps")]
    table += [(n, each[n], batch[n], each[n] // batch[n]) for n in below + above]
    lines = ["".join(f"{cell:>{len(title) + 2}}" for cell, title in zip(row, table[0], strict=True)) for row in table]
    return " or ".join(str(n) for n in below[-1:] + above[:1]), "".join(f"\n{line}" for line in lines)


def _fitting_heads(n_embd: int) -> str:
    fitting = [str(n_embd // size) for size in HEAD_SIZES if n_embd % size == 0]
    return f"set model.n_head to {' or '.join(fitting)}" if fitting else "set model.n_embd to a multiple of 64"


def options() -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the configuration, dotted as on the command line, with its field."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, schema.Section):
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field
