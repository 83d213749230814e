"""Initial weights as GPT-2's, drawn with Philox by flat index, so that they do not
depend on the number of ranks.
"""

import itertools
import math

from gpt2_triton.model import sharding, state_io
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.tables import State, param_entries

INIT_STD = 0.02


def init_weights(
    K: Kernels, s: State, table: type, dims: dict[str, int], rank: int, seed: int
) -> None:
    """Set weights to N(0, 0.02), residual projections to N(0, 0.02 / sqrt(2L)) and norms to 1.
    Everything else is 0: biases, the padded rows of wte and lmhead, and the rest of the state.
    """
    std = dict(normal=INIT_STD, residual=INIT_STD / math.sqrt(2 * dims["L"]))
    for flat in state_io.state_buffers(s).values():
        K.fill(flat, 0.0)
    shards = sharding.updated_shards(dims, rank)
    for p, e in itertools.product(shards, param_entries(table, dims)):
        first = max(p.first, e.offset)
        stop = min(p.first + p.length, e.offset + e.used)
        if first >= stop:
            continue
        part = slice(first - p.first, stop - p.first)
        w = s.params[p.param :][part]
        if e.init in std:
            low = None if s.master_low is None else p.of(s.master_low, "low")[part]
            K.normal_init(w, low, seed, first, std[e.init])
        elif e.init == "one":
            K.fill(w, 1.0)
