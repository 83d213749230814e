"""What tells one model from another: its tables of buffers, its schedule, and the names of its weights elsewhere."""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.model.gpt2 import buffers, names, schedule
from gpt2_triton.model.tables import param_entries


class Architecture(NamedTuple):
    Params: type
    Acts: type
    Fp8Buffers: type
    schedule: ModuleType
    by_name: Callable[[Any, int], dict[str, Tensor]]  # views of Params by other projects' names


def of(m: ModelConfig) -> Architecture:
    return Architecture(buffers.Params, buffers.Acts, buffers.Fp8Buffers, schedule, names.by_name)


def dimensions(m: ModelConfig) -> dict[str, int]:
    """Return the symbols of tables.py that the shapes of parameters use, and the numbers of parameters."""
    L, C = m.n_layer, m.n_embd
    d = dict(NH=m.n_head, C=C, D=3 * C, F=4 * C, G=4 * C, L=L, S=2 * L + 1, V=m.vocab_size, Vp=m.padded_vocab)
    d["Tmax"] = m.block_size
    entries = list(param_entries(of(m).Params, d))
    counts = [sum(math.prod(e.shape) for e in entries if e.bucket == bucket) for bucket in (0, 1)]
    return d | dict(N=entries[-1].offset + math.prod(entries[-1].shape), Ne=counts[0], Nl=counts[1])
