"""How the next token is chosen.  No torch here: commands check these options
before they import torch.
"""

from numbers import Integral, Real
from typing import NamedTuple

from gpt2_triton.errors import ConfigError


class Sampling(NamedTuple):
    """A distribution over the next token, made from the logits."""

    temperature: float = 1.0  # of the softmax; 0 takes the most likely token
    top_k: int = 0  # draw among the k most likely tokens; 0 among all
    top_p: float = 1.0  # then among the fewest tokens that together have probability p; 1 among all

    def check(self, prefix: str, tokens: int, seed: int) -> None:
        """Raise ConfigError for values out of range or of another type; `prefix`, such as "--",
        comes before an option's name.
        """
        least: dict[str, tuple[float, type, int]] = dict(
            tokens=(tokens, Integral, 1),
            temperature=(self.temperature, Real, 0),
            top_k=(self.top_k, Integral, 0),
            top_p=(self.top_p, Real, 0),
            seed=(seed, Integral, 0),
        )
        for name, (value, kind, limit) in least.items():
            if not isinstance(value, kind):
                what = "a whole number" if kind is Integral else "a number"
                raise ConfigError(f"{prefix}{name}: expected {what}, got {value!r}")
            if not value >= limit:  # NaN too
                raise ConfigError(f"{prefix}{name}: must be at least {limit}, got {value}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"{prefix}top_p: must be above 0 and at most 1, "
                f"got {self.top_p}; 1 keeps every token"
            )
