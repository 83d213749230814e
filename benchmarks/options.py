"""The check of an option, and a message, that several benchmarks have."""

from collections.abc import Iterable

from gpt2_triton.config.values import kept_in_bf16
from gpt2_triton.errors import ConfigError

NO_GPU = "needs a CUDA GPU, found none; with TRITON_INTERPRET=1 the kernels run on the CPU"


def require_keep_bf16(option: str, value: str, layers: Iterable[int]) -> None:
    """Raise ConfigError, which names the option, unless `value` can be fp8.keep_bf16 of models of so many layers."""
    try:
        for n_layer in layers:
            kept_in_bf16(value, n_layer)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
