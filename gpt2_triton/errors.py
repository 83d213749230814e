"""Errors that a user can correct: one line on stderr and an exit code.

Any other exception is a bug and keeps its traceback.
"""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """Base class.  The process ends with `exit_code`; an error `on_every_rank`
    is printed once per host.
    """

    exit_code = 2
    on_every_rank = False


class ConfigError(UserError):
    """The configuration or the command line is wrong; one line for each mistake."""

    on_every_rank = True


class DataError(UserError):
    """Data cannot be used."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to another run."""

    exit_code = 4


class OutOfMemoryError(UserError):
    """The memory plan does not fit the device."""

    exit_code = 5


class NonFiniteError(UserError):
    """Losses or gradients stayed non-finite for train.skip_limit steps in a
    row, or rewinds did not help.
    """

    exit_code = 6
    on_every_rank = True


class PeerLostError(UserError):
    """Rendezvous failed, or a rank can no longer be reached, most likely
    because another rank has exited.
    """

    exit_code = 1


class ReplicaMismatchError(UserError):
    """Weights that must be equal on all ranks differ."""

    exit_code = 1
    on_every_rank = True


@contextlib.contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Mark an error as common to all ranks, so that each host prints it once."""
    try:
        yield
    except UserError as error:
        error.on_every_rank = True
        raise


def login_advice(error: Exception) -> str:
    """Return what to do about an error of the Hugging Face Hub if a login may help, else ""."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if "GatedRepoError" in kinds or "gated dataset" in str(error):
        return f"accept the licence on its page at huggingface.co, then {login}"
    if "RepositoryNotFoundError" in kinds:
        return f"check the name; if it is private, {login}"
    return ""
