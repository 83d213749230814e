"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC11) keyed by seed,
purpose, step and flat element.

One Philox call on the counter (i // 4 low, i // 4 high, step, purpose) returns four 32-bit words;
element i takes word i % 4.  So a number depends on seed, purpose, step and element, and not on
block sizes, launches or ranks.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.master import split_master
from gpt2_triton.kernels.step_io import SEED_HIGH, SEED_LOW
from gpt2_triton.kernels.tuning import flat_block

INIT = tl.constexpr(0)  # purposes
ROUND = tl.constexpr(1)
SAMPLE = tl.constexpr(2)
DROPOUT = tl.constexpr(3)


@triton.jit
def philox_words(seed, first, step, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """Return uint32 words for elements first ... first + BLOCK - 1; `first` (int64) and
    BLOCK are multiples of 4.
    """
    counter = first // 4 + tl.arange(0, BLOCK // 4).to(tl.int64)
    return words_at(seed, counter, step, PURPOSE)


@triton.jit
def words_at(seed, counter, step, purpose):
    """Return four uint32 words, side by side, for each int64 counter."""
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    r0, r1, r2, r3 = tl.philox(
        seed, low, high, tl.zeros_like(low) + step.to(tl.uint32), tl.zeros_like(low) + purpose
    )
    return tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))


@triton.jit
def step_seed(step_key_ptr):
    """Return the run's seed, which is in the step's key."""
    return tl.load(step_key_ptr + SEED_LOW).to(tl.int64) | (
        tl.load(step_key_ptr + SEED_HIGH).to(tl.int64) << 32
    )


@triton.jit(do_not_specialize=["seed", "first"])  # one kernel for every seed
def _normal_init_kernel(w_ptr, low_ptr, n, seed, first, std, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK
    i = at + tl.arange(0, BLOCK)
    bits = philox_words(seed, first + at, tl.zeros((1,), tl.int32), INIT, BLOCK)
    # Box-Muller on pairs: words 2k, 2k+1 become the normals 2k, 2k+1; u1 in (0, 1], so
    # that the logarithm is finite
    a, b = tl.split(tl.reshape(bits, (BLOCK // 2, 2)))
    u1 = ((a >> 8).to(tl.float32) + 1.0) * (1.0 / 16777216.0)
    u2 = (b >> 8).to(tl.float32) * (6.283185307179586 / 16777216.0)
    radius = tl.sqrt(-2.0 * tl.log(u1)) * std
    w = tl.interleave(radius * tl.cos(u2), radius * tl.sin(u2))
    mask = i < n
    if low_ptr is None:
        tl.store(w_ptr + i, w, mask=mask)
    else:
        hi, low = split_master(w)
        tl.store(w_ptr + i, hi, mask=mask)
        tl.store(low_ptr + i, low, mask=mask)


@triton.jit
def _fill_kernel(w_ptr, n, value, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(w_ptr + i, tl.zeros((BLOCK,), tl.float32) + value, mask=i < n)


@contract("w[n] low[n]?")
def normal_init(w: Tensor, low: Tensor | None, seed: int, first: int, std: float) -> None:
    """w = N(0, std) from Philox at flat index first + i, a multiple of 4; low gets
    the bits that bf16 lacks.
    """
    block = flat_block(w.numel(), 1024)
    _normal_init_kernel[(triton.cdiv(w.numel(), block),)](
        w, low, w.numel(), seed, first, std, BLOCK=block
    )


@contract("w[*]")
def fill(w: Tensor, value: float) -> None:
    block = flat_block(w.numel(), 1024)
    _fill_kernel[(triton.cdiv(w.numel(), block),)](w, w.numel(), value, BLOCK=block)
