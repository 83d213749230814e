"""What tells one model from another: its tables of buffers, its schedule, and the
names of its weights elsewhere.

It is the only module that imports a model.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.model.fp8_table import Fp8Operands
from gpt2_triton.model.gpt2 import buffers as gpt2_buffers
from gpt2_triton.model.gpt2 import names as gpt2_names
from gpt2_triton.model.gpt2 import schedule as gpt2_schedule
from gpt2_triton.model.gpt2 import wiring as gpt2_wiring
from gpt2_triton.model.llama import buffers as llama_buffers
from gpt2_triton.model.llama import names as llama_names
from gpt2_triton.model.llama import rope
from gpt2_triton.model.llama import schedule as llama_schedule
from gpt2_triton.model.llama import wiring as llama_wiring
from gpt2_triton.model.model_view import Cut, Layers, Wiring
from gpt2_triton.model.tables import param_entries


class Architecture(NamedTuple):
    """What a model defines; the engine takes all else from it."""

    Params: type
    Acts: type
    Fp8Buffers: type
    schedule: Layers
    wire: Callable[[Cut], Wiring]  # builds what its launches take
    by_name: Callable[[Any, int], dict[str, Tensor]]  # views of Params by other projects' names
    # writes what Acts holds for a whole run
    fill: Callable[[Any, ModelConfig], None] = lambda a, m: None


def _fill_rope(a: Any, m: ModelConfig) -> None:
    positions, HS = a.rope.shape
    a.rope.copy_(torch.from_numpy(rope.table(positions, HS, m.rope_theta, m.rope_factor)))


GPT2 = Architecture(
    gpt2_buffers.Params,
    gpt2_buffers.Acts,
    gpt2_buffers.Fp8Buffers,
    gpt2_schedule,
    gpt2_wiring.wire,
    gpt2_names.by_name,
)
LLAMA = Architecture(
    llama_buffers.Params,
    llama_buffers.Acts,
    Fp8Operands,
    llama_schedule,
    llama_wiring.wire,
    llama_names.by_name,
    _fill_rope,
)


def of(m: ModelConfig) -> Architecture:
    """Return the architecture of a configuration; an untied head has Params of its own."""
    if m.arch == "gpt2":
        return GPT2
    return LLAMA if m.tied else LLAMA._replace(Params=llama_buffers.UntiedParams)


def dimensions(m: ModelConfig) -> dict[str, int]:
    """Return the symbols of tables.py that the shapes of parameters use, and
    the numbers of parameters.
    """
    L = m.n_layer
    d = dict(NH=m.n_head, HS=m.head_size, C=m.n_embd, Cq=m.q_channels, Ckv=m.kv_channels)
    d["D"] = d["Cq"] + 2 * d["Ckv"]
    normed = (d["Cq"] + d["Ckv"]) // d["HS"] if m.qk_norm else 0
    d |= dict(Qn=normed, Hn=d["HS"] if normed else 0)
    d |= dict(F=m.inner, G=m.inner * (2 if m.arch == "llama" else 1))
    d |= dict(L=L, S=2 * L + 1, V=m.vocab_size, Vp=m.padded_vocab, Tmax=m.block_size)
    counts = [0] * (L + 2)  # of each bucket
    for e in param_entries(of(m).Params, d):
        counts[e.bucket] += math.prod(e.shape)
    return d | dict(N=sum(counts), Ne=counts[0], Nl=counts[1])
