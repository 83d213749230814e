"""`bench` and `verify` name the commands to use: an installed package has no benchmarks, they need a checkout."""

from typing import Annotated

from cyclopts import Parameter

from gpt2_triton.errors import ConfigError
from gpt2_triton.version import __version__

Ignored = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


def bench(*_: Ignored) -> None:
    """Measure and tune: python -m benchmarks steps, ops or tune, in a checkout."""
    raise _elsewhere("bench", "steps, ops or tune")


def verify(*_: Ignored) -> None:
    """Check the kernels: python -m benchmarks verify, in a checkout."""
    raise _elsewhere("verify", "verify")


def _elsewhere(name: str, command: str) -> ConfigError:
    return ConfigError(f"{name}: run python -m benchmarks {command} in the root of a checkout of version {__version__}")
