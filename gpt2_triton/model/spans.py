"""The spans of the flat buffers that a rank updates, and whose gradients it squares."""

from collections.abc import Iterator

from torch import Tensor

from gpt2_triton.config.config import Config
from gpt2_triton.model import sharding
from gpt2_triton.model.rates import bucket_rates
from gpt2_triton.model.tables import State
from gpt2_triton.operands import Span


def norm_grads(state: State, dims: dict[str, int], rank: int) -> list[Tensor]:
    """Return this rank's shard of the gradients in as few spans as possible."""
    spans = sharding.coalesce((p.grad, p.length) for p in sharding.owned_shards(dims, rank))
    return [sharding.reduced_gradients(state)[start : start + n] for start, n in spans]


def update_spans(
    state: State, dims: dict[str, int], rank: int, config: Config
) -> Iterator[tuple[int, Span]]:
    """Yield this rank's spans for AdamW, with the number of the first bucket of each."""
    embed, layers, rest = bucket_rates(config)
    rates = {0: embed, dims["L"] + 1: rest}
    for p in sharding.updated_shards(dims, rank):
        if p.optimizer.matrices:
            continue
        rate = rates.get(p.bucket, layers)
        m = p.of(state.m, "m")
        v = p.of(state.v, "v")
        low = None if state.master_low is None else p.of(state.master_low, "low")
        w = state.params[p.param : p.param + p.length]
        g = sharding.reduced_gradients(state)[p.grad : p.grad + p.length]
        yield p.bucket, Span(w, m, v, low, g, p.first, rate.lr_factor, rate.decay)
