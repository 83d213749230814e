"""The check of an option, a message and a usage that several benchmarks have."""

import sys
from collections.abc import Iterable

from gpt2_triton.config.values import kept_in_bf16
from gpt2_triton.errors import ConfigError


def timed_arguments(
    module: str, others: str, least: int, most: int
) -> tuple[str, int, int, float, *tuple[str, ...]]:  # fmt: skip
    """Return size, batch, steps and start of a program that `benchmarks steps` starts, and from `least` to `most` other
    words.  Exit with code 2 and the usage if words are missing, are too many or are not numbers.
    """
    try:
        size, batch, steps, start, *words = sys.argv[1:]
        if least <= len(words) <= most:
            return size, int(batch), int(steps), float(start), *words
    except ValueError:
        pass
    print(f"usage: python -m benchmarks.{module} SIZE BATCH STEPS START {others}", file=sys.stderr)
    sys.exit(2)


def require_keep_bf16(option: str, value: str, layers: Iterable[int]) -> None:
    """Raise ConfigError, which names the option, unless `value` can be fp8.keep_bf16 of models of so many layers."""
    try:
        for n_layer in layers:
            kept_in_bf16(value, n_layer)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
