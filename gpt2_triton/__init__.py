"""Training of GPT-2, Llama 3 and Qwen3: PyTorch provides memory and NCCL, and every arithmetic
operation is a Triton kernel.

The names of __all__ are the Python API.  `import gpt2_triton` imports neither torch nor numpy:
api.py is imported when one of its names is first used.
"""

from typing import TYPE_CHECKING, Any

from gpt2_triton.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    PeerLostError,
    ReplicaMismatchError,
    UserError,
)
from gpt2_triton.version import __version__ as __version__

if TYPE_CHECKING:
    from gpt2_triton.api import Config, Model, Run, load, train, write_shard

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "Model",
    "NonFiniteError",
    "OutOfMemoryError",
    "PeerLostError",
    "ReplicaMismatchError",
    "Run",
    "UserError",
    "load",
    "train",
    "write_shard",
]


def __getattr__(name: str) -> Any:
    """Return a name of api.py; AttributeError for other names, as Python expects
    when it imports a submodule.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpt2_triton import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
