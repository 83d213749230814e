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

Many programs share the logits of a sequence.  Each writes its largest score, and that token, in the
place of its first two logits; then one program takes the best.  So a call overwrites the logits.

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
from gpt2_triton.kernels.tuning import next_power_of_2, tuned


@triton.jit
def _limits(z_ptr, V, BLOCK: tl.constexpr):
    """Return the largest and the smallest logit."""
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    smallest = tl.full((BLOCK,), float("inf"), tl.float32)
    for first in range(0, V, BLOCK):
        j = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(z_ptr + j, mask=j < V, other=float("-inf")))
        smallest = tl.minimum(smallest, tl.load(z_ptr + j, mask=j < V, other=float("inf")))
    return tl.max(largest, 0), tl.min(smallest, 0)


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
    """Return the largest bound from `low` on that `goal` logits (MASS: mass) reach, and a count."""
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


@triton.jit(do_not_specialize=["top_k"])
def _keep_kernel(
    z_ptr, V, Vp, factor, top_k, top_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the logits of a sequence that are not kept by -inf."""
    z_ptr += tl.program_id(0).to(tl.int64) * Vp
    peak, bound = _limits(z_ptr, V, BLOCK)
    count = tl.cast(V, tl.int32)
    if TOP_K:
        bound, count = _raise_bound(
            z_ptr, V, bound, count, top_k.to(tl.float32), peak, factor, False, BLOCK
        )
    if TOP_P:
        _, mass = _reached(z_ptr, V, bound, peak, factor, True, BLOCK)
        bound, count = _raise_bound(z_ptr, V, bound, count, top_p * mass, peak, factor, True, BLOCK)
    for first in range(0, V, BLOCK):
        j = first + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + j, mask=j < V, other=float("inf"))
        tl.store(z_ptr + j, float("-inf"), mask=z < bound)


@triton.jit
def _best_of_part_kernel(z_ptr, seq_ptr, V, Vp, inverse, GREEDY: tl.constexpr, BLOCK: tl.constexpr):
    """Write the largest score of BLOCK logits, and its index, in the place of the first two."""
    b = tl.program_id(0).to(tl.int64)
    seq_ptr += b * FIELDS
    drawn = tl.load(seq_ptr + DRAWN)
    seed = tl.load(seq_ptr + SEED_LOW).to(tl.int64) | (
        tl.load(seq_ptr + SEED_HIGH).to(tl.int64) << 31
    )
    first = tl.program_id(1) * BLOCK
    score = tl.zeros((BLOCK,), tl.float32)
    if not GREEDY:
        score = _gumbel(philox_words(seed, tl.cast(first, tl.int64), drawn, SAMPLE, BLOCK))
    j = first + tl.arange(0, BLOCK)
    score += tl.load(z_ptr + b * Vp + j, mask=j < V, other=float("-inf")) * inverse
    best, index = tl.max(score, 0, return_indices=True)
    tl.store(z_ptr + b * Vp + first, best)
    tl.store(z_ptr + b * Vp + first + 1, (first + index).to(tl.float32))  # exact below 2^24


@triton.jit
def _best_of_parts_kernel(z_ptr, seq_ptr, V, Vp, PART: tl.constexpr, PARTS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    seq_ptr += b * FIELDS
    row = tl.load(seq_ptr + ROW)
    drawn = tl.load(seq_ptr + DRAWN)
    part = tl.arange(0, PARTS)
    at = z_ptr + b * Vp + part * PART
    _, best = tl.max(tl.load(at, mask=part * PART < V, other=float("-inf")), 0, return_indices=True)
    token = tl.load(z_ptr + b * Vp + best * PART + 1).to(tl.int32)
    tl.store(seq_ptr + TOKEN, token)
    tl.store(seq_ptr + ROW, row + 1)
    tl.store(seq_ptr + DRAWN, drawn + 1)


@contract("seq[B,5]+ logits[B,Vp]+")
def sample_token(
    seq: Tensor, logits: Tensor, V: int, temperature: float, top_k: int, top_p: float
) -> None:
    """Sample each sequence's next token from logits[:, :V], which are overwritten; temperature 0
    takes the most likely, top_k 0 all.
    """
    B, Vp = logits.shape
    greedy = temperature == 0
    # in fp32 1 / 1e-40 is inf, and 1 / 1e40 is 0, which times -inf is NaN
    inverse = 1.0 if greedy else min(max(1.0 / temperature, 1e-30), 1e30)
    kept = dict(TOP_K=not greedy and 0 < top_k < V, TOP_P=not greedy and top_p < 1)
    if any(kept.values()):
        row = tuned("sample_keep", "fp32", BLOCK=V)
        factor = inverse * LOG2E.value
        _keep_kernel[(B,)](logits, V, Vp, factor, min(top_k, V), float(top_p), **kept, **row)
    row = tuned("sample_token", "fp32", BLOCK=V)
    part = row["BLOCK"]
    parts = triton.cdiv(V, part)
    _best_of_part_kernel[(B, parts)](logits, seq, V, Vp, inverse, GREEDY=greedy, **row)
    _best_of_parts_kernel[(B,)](
        logits, seq, V, Vp, PART=part, PARTS=next_power_of_2(parts), num_warps=1
    )
