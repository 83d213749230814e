"""The check of an option, a message and a usage that several benchmarks have."""

import sys
from collections.abc import Iterable

from gpt2_triton.config.values import kept_in_bf16
from gpt2_triton.errors import ConfigError

NO_GPU = "needs a CUDA GPU, found none; with TRITON_INTERPRET=1 the kernels run on the CPU"


def timed_arguments(module: str, others: str, required: int) -> tuple[str, int, int, float, *tuple[str, ...]]:
    """Return size, batch, steps and start of a program that `benchmarks steps` starts, and the `others` as words, of
    which so many are required; exit with code 2 and the usage if words are missing or no numbers.
    """
    try:
        size, batch, steps, start, *words = sys.argv[1:]
        if len(words) >= required:
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
