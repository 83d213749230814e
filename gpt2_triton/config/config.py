"""The configuration of a run: a frozen tree of the sections of schema.py, and the sizes derived from it.

load.py reads it from YAML and the command line; rules.py has the rules between keys.
"""

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from gpt2_triton.config import schema
from gpt2_triton.config.rules import conflicts
from gpt2_triton.errors import ConfigError


class Config(schema.ConfigSection):
    """The whole configuration of a run.  Derived sizes are properties."""

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
        "scratch",
        description="initial weights: scratch, checkpoint:DIR, hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE",
        json_schema_extra=schema.FREE,
    )

    @property
    def head_rows(self) -> int:
        """Rows of logits computed at once.

        With the default, at GPT-2's vocabulary, the buffer has 0.9 to 1.5 GiB, and the tiles of dX fill 132
        multiprocessors two (n_embd 768), almost four (1024) or almost three times (1280, 1600).
        """
        if self.memory.head_rows:
            return self.memory.head_rows
        return 11264 if self.model.n_embd <= 768 else 16384 if self.model.n_embd <= 1024 else 10112

    @property
    def total_batch_tokens(self) -> int:
        return self.train.total_batch_tokens or self.train.batch_size * self.train.seq_len

    # processes of this run, one per GPU; not a key, so that a run can be resumed on another number of GPUs
    _started: int = PrivateAttr(1)

    @property
    def gpus(self) -> int:
        return self.parallel.gpus or self._started

    @property
    def zero(self) -> int:
        """The ZeRO stage in use; 0 on one GPU."""
        return self.parallel.zero if self.gpus > 1 else 0

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward and backward pass: batch_size, or all sequences of a GPU per step if fewer."""
        return min(self.train.batch_size, self.total_batch_tokens // self.train.seq_len // self.gpus)

    @property
    def accumulation(self) -> int:
        """Micro-steps per step."""
        return self.total_batch_tokens // (self.gpus * self.micro_batch * self.train.seq_len)

    @property
    def n_params(self) -> int:
        """Number of parameters as llm.c counts: with the padded vocabulary and wpe; the head is wte and counts once."""
        c, layers = self.model.n_embd, self.model.n_layer
        layer = 12 * c * c + 13 * c  # matrices 3 + 1 + 4 + 4; biases 3 + 1 + 4 + 1, two norms of 2 each
        return (self.model.padded_vocab + self.model.block_size) * c + layers * layer + 2 * c

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations per token of a training step: 6N + 6*L*C*T, as llm.c counts, to be comparable.

        N is n_params.  The second term is causal attention.  Recomputation in the backward pass is not counted.
        """
        return 6 * self.n_params + 6 * self.model.n_layer * self.model.n_embd * self.train.seq_len

    def replace(self, **changes: dict[str, Any]) -> "Config":
        """Return a copy with other values, without validation: replace(memory={"recompute": "gelu"})."""
        copies = {name: getattr(self, name).model_copy(update=values) for name, values in changes.items()}
        return self.model_copy(update=copies)

    def with_gpus(self, gpus: int) -> "Config":
        """Return the configuration of a run on this many GPUs.

        ConfigError if parallel.gpus is another number, or if the batch does not divide.
        """
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
        """Check the rules between keys; the context holds the number of GPUs, on which the batch must divide."""
        if info.context:
            self._started = info.context["gpus"]
        if problems := list(conflicts(self)):
            raise schema.ConflictError(problems)
        return self


def options() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key, dotted as on the command line, with its field."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, schema.ConfigSection):
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field


def may_change_on_resume(key: str) -> bool:
    """Return whether a resumed run may have another value of this dotted key; False for an unknown key."""
    field = dict(options()).get(key)
    return field is not None and field.json_schema_extra == schema.FREE
