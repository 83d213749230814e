"""Sampling of each sequence's next token from its logits, with temperature, top-k and
top-p, without sorting them.

top_k    keep the k largest logits: z >= the largest bound that at least k logits reach
top_p    of the kept logits, keep the most likely that together have probability p (nucleus
         sampling, Holtzman et al.  2020, https://arxiv.org/abs/1904.09751): z >= the largest bound
         that leaves at least p of their mass
token    argmax_j (z[j] / temperature + G[j]),  G[j] = -log(E[j]),
         E[j] = -log(1 - u[j]) exponential: the Gumbel-max
         trick; j has probability softmax(z / temperature)[j]

Bisection finds both bounds.  It ends when one logit is left between a bound that is too high and a
bound that is not, so the sets are exact.  Equal logits at a bound are kept or removed together.
The mass is summed in fp32, in a fixed order.

u[j] is word j of Philox (philox.py) for the sequence's seed and the number of tokens sampled so
far.  It does not depend on the other sequences of the decode batch.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.decode import DRAWN, FIELDS, ROW, SEED_HIGH, SEED_LOW, TOKEN
from gpt2_triton.kernels.device_math import LOG2E
from gpt2_triton.kernels.philox import SAMPLE, philox_words
from gpt2_triton.kernels.tuning import tuned


@triton.jit
def _limits(z_ptr, V, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit, and with SMALLEST the smallest, else -inf."""
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    smallest = tl.full((BLOCK,), float("inf"), tl.float32)
    for first in range(0, V, BLOCK):
        j = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(z_ptr + j, mask=j < V, other=float("-inf")))
        if SMALLEST:
            smallest = tl.minimum(smallest, tl.load(z_ptr + j, mask=j < V, other=float("inf")))
    peak = tl.max(largest, 0)
    return peak, tl.min(smallest, 0) if SMALLEST else peak - float("inf")


@triton.jit
def _reached(z_ptr, V, bound, peak, factor, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many logits are >= `bound`; with MASS the sum of exp((z - peak) / temperature)."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        j = first + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + j, mask=j < V, other=float("-inf"))
        kept = (z >= bound) & (j < V)
        count += kept.to(tl.int32)
        if MASS:
            mass += tl.where(kept, tl.exp2((z - peak) * factor), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _raise_bound(
    z_ptr, V, low, low_count, goal, peak, factor, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return `low` raised to the largest bound that `goal` logits (MASS: mass) reach; a count."""
    high = peak
    high_count, mass = _reached(z_ptr, V, high, peak, factor, MASS, BLOCK)
    enough = (mass if MASS else high_count.to(tl.float32)) >= goal
    low = tl.where(enough, high, low)
    low_count = tl.where(enough, high_count, low_count)
    middle = low + (high - low) * 0.5
    # ends if [low, high) has one logit, the last to keep, or no number but low:
    # then all logits there are equal
    while (low_count - high_count > 1) & (middle > low) & (middle < high):
        count, mass = _reached(z_ptr, V, middle, peak, factor, MASS, BLOCK)
        enough = (mass if MASS else count.to(tl.float32)) >= goal
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle)
        high_count = tl.where(enough, high_count, count)
        middle = low + (high - low) * 0.5
    return low, low_count


@triton.jit
def _gumbel(words):
    """Return -log(E), E = -log(1 - u), u = (word + 1/2) / 2^32; small E, which win, are precise."""
    u = (words.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    # u^3 / 3 < 4e-7 u; u may be 1
    e = tl.where(u < 2.0**-10, u + u * u * 0.5, -tl.log(tl.maximum(1.0 - u, 2.0**-25)))
    return -tl.log(e)


@triton.jit
def _argmax(z_ptr, V, bound, peak, factor, seed, drawn, GREEDY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first index of the largest score among the logits that are at least `bound`."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, V, BLOCK):
        j = first + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + j, mask=j < V, other=float("-inf"))
        score = z - peak
        if not GREEDY:
            words = philox_words(seed, tl.cast(first, tl.int64), drawn, SAMPLE, BLOCK)
            score = score * (factor / LOG2E) + _gumbel(words)
        better = (z >= bound) & (j < V) & (score > best)
        best = tl.where(better, score, best)
        index = tl.where(better, j, index)
    return tl.min(tl.where(best == tl.max(best, 0), index, V), 0)


@triton.jit(do_not_specialize=["top_k"])
def _sample_token_kernel(
    seq_ptr, logits_ptr, V, Vp, factor, top_k, top_p,
    GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    seq_ptr += b * FIELDS
    z_ptr = logits_ptr + b * Vp
    drawn = tl.load(seq_ptr + DRAWN)
    seed = tl.load(seq_ptr + SEED_LOW).to(tl.int64) | (
        tl.load(seq_ptr + SEED_HIGH).to(tl.int64) << 31
    )
    row = tl.load(seq_ptr + ROW)
    peak, bound = _limits(z_ptr, V, TOP_K or TOP_P, BLOCK)
    count = V + drawn * 0  # a tensor, as the count of a bound is
    if TOP_K:
        bound, count = _raise_bound(
            z_ptr, V, bound, count, top_k.to(tl.float32), peak, factor, False, BLOCK
        )
    if TOP_P:
        _, mass = _reached(z_ptr, V, bound, peak, factor, True, BLOCK)
        bound, count = _raise_bound(z_ptr, V, bound, count, top_p * mass, peak, factor, True, BLOCK)
    tl.store(seq_ptr + TOKEN, _argmax(z_ptr, V, bound, peak, factor, seed, drawn, GREEDY, BLOCK))
    tl.store(seq_ptr + ROW, row + 1)
    tl.store(seq_ptr + DRAWN, drawn + 1)


@contract("seq[B,5]+ <- logits[B,Vp]")
def sample_token(
    seq: Tensor, logits: Tensor, V: int, temperature: float, top_k: int, top_p: float
) -> None:
    """Sample each sequence's next token from logits[:, :V]; temperature 0 takes the
    most likely, top_k 0 all.
    """
    B, Vp = logits.shape
    greedy = temperature == 0
    # a temperature below 1e-30 would give 0 * inf at the largest logit
    factor = 1.0 if greedy else min(1.0 / temperature, 1e30) * LOG2E.value
    options = dict(
        GREEDY=greedy, TOP_K=not greedy and 0 < top_k < V, TOP_P=not greedy and top_p < 1
    )
    row = tuned("sample_token", "fp32", BLOCK=V)
    _sample_token_kernel[(B,)](
        seq, logits, V, Vp, factor, min(top_k, V), float(top_p), **options, **row
    )
