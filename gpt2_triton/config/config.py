"""The configuration of a run: a frozen tree of the sections of schema.py, and
the sizes derived from it.
"""

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import ValidationInfo, model_validator

from gpt2_triton.config.counts import Counts
from gpt2_triton.config.load import Source, load
from gpt2_triton.config.removed import without_removed
from gpt2_triton.config.rules import conflicts
from gpt2_triton.config.schema import ConflictError
from gpt2_triton.config.step_shape import step_conflicts


class Config(Counts):
    """The whole configuration of a run.  Derived sizes are properties, those of counts.py too."""

    @classmethod
    def load(
        cls, source: Source, overrides: Mapping[str, Any] | None = None, gpus: int | None = 1
    ) -> "Config":
        """Return a configuration from a recipe, a YAML file, a Config or a tree such
        as {"train": {"steps": 10}}.

        `overrides`, such as {"train.steps": 20}, replace its values.  The step must divide among
        parallel.gpus GPUs, or among `gpus` if parallel.gpus is null; None skips this check.
        ConfigError has a line for each mistake.
        """
        return load(cls, source, overrides or {}, gpus)

    @property
    def head_rows(self) -> int:
        """Rows of logits computed at once.

        The default makes a buffer of 0.9 to 1.5 GiB at GPT-2's vocabulary.  The tiles of the head's
        input gradient fill an H100's 132 multiprocessors 2 times (n_embd 768), almost 4 times
        (1024) or almost 3 times (1600).
        """
        if self.memory.head_rows:
            return self.memory.head_rows
        if self.model.n_embd <= 768:
            return 11264
        return 16384 if self.model.n_embd <= 1024 else 10112

    @property
    def weight_decay(self) -> float:
        """Decoupled weight decay, as optim.weight_decay or optim.tau gives it."""
        o = self.optim
        if o.tau is None:
            return o.weight_decay or 0.0
        return o.tau / (o.lr * self.train.steps)

    @property
    def embed_decay(self) -> float:
        """Decoupled weight decay of the embeddings."""
        return self.weight_decay if self.optim.embed_decay is None else self.optim.embed_decay

    def replace(self, **changes: dict[str, Any]) -> "Config":
        """Return a copy with other values, without validation:
        replace(memory={"recompute": "gelu"}).
        """
        copies = {
            name: getattr(self, name).model_copy(update=values) for name, values in changes.items()
        }
        return self.model_copy(update=copies)

    def to_dict(self) -> dict[str, Any]:
        """Return every key by section, as state.json has them."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return every key as YAML, which `Config.load` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, sections: Any) -> Any:
        return without_removed(sections) if isinstance(sections, Mapping) else sections

    @model_validator(mode="after")
    def _fields_agree(self, info: ValidationInfo) -> "Config":
        """Check the rules between keys, and about GPUs if pydantic's context has `gpus`."""
        problems = list(conflicts(self))
        if info.context:
            problems += step_conflicts(self.train, self.parallel.gpus or info.context["gpus"])
        if problems:
            raise ConflictError(problems)
        return self
