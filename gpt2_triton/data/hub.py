"""Access to the Hugging Face Hub: what a repository holds, and failures as one line."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpt2_triton.errors import DataError, bad_data


@contextmanager
def hub_errors_as(where: object, expected: str, todo: str) -> Iterator[None]:
    """Raise any exception of the block as a DataError; for calls of `datasets` and `huggingface_hub` alone."""
    try:
        yield
    except DataError:
        raise
    except ModuleNotFoundError as error:
        what, install = f"{error.name} is not installed", "pip install datasets"
        raise bad_data(where, what, "no such package", "Hugging Face's libraries", install) from None
    except Exception as error:  # theirs, their network library's, the system's; they differ by version
        got = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise bad_data(where, "cannot be had", got, expected, todo) from error


def repository(name: str, revision: str | None, expected: str, todo: str, **what: Any) -> Any:
    """Return the Hub's description of a dataset; `what` as in huggingface_hub's dataset_info."""
    with hub_errors_as(name, expected, todo):
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name, revision=revision, timeout=30, **what)
