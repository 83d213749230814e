"""Access to the Hugging Face Hub; every failure is one line."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpt2_triton.errors import DataError, login_advice

AGAIN = "run the same command again: it resumes after the last finished shard"


@contextmanager
def hub_errors(where: object, todo: str) -> Iterator[None]:
    """Raise any exception of the block as a DataError; the block calls `datasets`
    or `huggingface_hub` only.
    """
    try:
        yield
    except Exception as error:  # they and their network library raise many kinds, by version
        got = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise DataError(f"{where}: cannot read: {got}; {login_advice(error) or todo}") from error


def repository(name: str, revision: str | None, todo: str, **what: Any) -> Any:
    """Return the Hub's description of a dataset; `what` as in huggingface_hub's dataset_info."""
    with hub_errors(name, todo):
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name, revision=revision, timeout=30, **what)
