"""`bench` and `verify` need a checkout, as an installed package has no benchmarks: they name the commands to use."""

from typing import Annotated

from cyclopts import Parameter

from gpt2_triton import __version__
from gpt2_triton.errors import ConfigError

Ignored = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]


def bench(*_: Ignored) -> None:
    """Moved: python -m benchmarks steps, ops or tune, in a checkout."""
    raise _moved("bench", "steps, ops or tune")


def verify(*_: Ignored) -> None:
    """Moved: python -m benchmarks verify, in a checkout."""
    raise _moved("verify", "verify")


def _moved(name: str, command: str) -> ConfigError:
    return ConfigError(f"{name}: run python -m benchmarks {command} in the root of a checkout of version {__version__}")
