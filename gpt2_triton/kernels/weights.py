"""Loads and stores the weights of an update, for AdamW and Muon, in one of three storages, and
moments in fp32 or bf16.  Moments in bf16 are rounded like weights.

fp32            as they are
bf16            rounded stochastically: 16 random bits are added below the bits that stay.  The
                rounding error is then 0 on average, and updates below half an ulp are not lost.
                Philox gives 32 bits for (seed, step, element): the weight takes the lower half, the
                moments the upper half.  That both moments take the same bits changes the mean of m
                / sqrt(v) by about 1e-6 of it.
bf16 with low   exactly, as bf16 and the 16 lower bits (master.split_master)
"""

import triton
import triton.language as tl

from gpt2_triton.kernels.master import join_master, split_master
from gpt2_triton.kernels.philox import ROUND, philox_words, step_seed
from gpt2_triton.kernels.step_io import STEP


@triton.jit
def load_weights(w_ptr, low_ptr, i, mask):
    """Return the weights at offsets i in fp32."""
    stored = tl.load(w_ptr + i, mask=mask, other=0.0)
    if low_ptr is None:
        return stored.to(tl.float32)
    else:
        return join_master(stored, tl.load(low_ptr + i, mask=mask, other=0))


@triton.jit
def random_words(step_key_ptr, first, USED: tl.constexpr, BLOCK: tl.constexpr):
    """Return random words, to round BLOCK elements from flat index `first`, a multiple
    of 4; zeros without USED.
    """
    if not USED:
        return tl.zeros((BLOCK,), tl.uint32)
    return philox_words(step_seed(step_key_ptr), first, tl.load(step_key_ptr + STEP), ROUND, BLOCK)


@triton.jit
def round_stochastically(x, noise):
    """Return fp32 x in bf16; noise is 16 random bits."""
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(finite, (bits + noise) & 0xFFFF0000, bits)
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def store_moment(m, m_ptr, i, mask, words):
    """Store an fp32 moment at offsets i, in the storage of m_ptr."""
    if m_ptr.dtype.element_ty == tl.bfloat16:
        m = round_stochastically(m, words >> 16)
    tl.store(m_ptr + i, m, mask=mask)


@triton.jit
def store_weights(w, w_ptr, low_ptr, i, mask, words, STOCHASTIC: tl.constexpr):
    """Store fp32 weights at offsets i."""
    if STOCHASTIC:
        tl.store(w_ptr + i, round_stochastically(w, words & 0xFFFF), mask=mask)
    elif low_ptr is not None:
        hi, low = split_master(w)
        tl.store(w_ptr + i, hi, mask=mask)
        tl.store(low_ptr + i, low, mask=mask)
    else:
        tl.store(w_ptr + i, w, mask=mask)
