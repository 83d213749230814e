"""Keys of a configuration on a command line."""

from collections.abc import Mapping
from typing import Annotated

from cyclopts import Parameter

Keys = Annotated[str, Parameter(allow_leading_hyphen=True)]


def words_of(keys: Mapping[str, object]) -> list[str]:
    """Return the words of a command line that give keys their values."""
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]
