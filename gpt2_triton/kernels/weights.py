"""Loads and stores the weights of an update, in one of three storages; AdamW and Muon share it.

fp32            as they are
bf16            rounded stochastically: 16 random bits are added below the ones that stay, so that the rounding error
                is 0 on average and updates smaller than half an ulp are not lost; the bits are Philox's for (seed,
                step, element)
bf16 with low   exactly, as bf16 and the 16 lower bits (device_math.split_master)
"""

import triton
import triton.language as tl

from gpt2_triton.kernels.device_math import join_master, split_master
from gpt2_triton.kernels.philox import ROUND, philox_words
from gpt2_triton.kernels.step_io import SEED_HIGH, SEED_LOW, STEP


@triton.jit
def load_weights(w_ptr, low_ptr, i, mask):
    """Return the weights at offsets i in fp32."""
    stored = tl.load(w_ptr + i, mask=mask, other=0.0)
    if low_ptr is None:
        return stored.to(tl.float32)
    else:
        return join_master(stored, tl.load(low_ptr + i, mask=mask, other=0))


@triton.jit
def store_weights(w, w_ptr, low_ptr, i, mask, step_key_ptr, first, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    """Store BLOCK fp32 weights at offsets i; `first`, a multiple of 4, is the flat index of the first of them."""
    if STOCHASTIC:
        seed = tl.load(step_key_ptr + SEED_LOW).to(tl.int64) | (tl.load(step_key_ptr + SEED_HIGH).to(tl.int64) << 32)
        noise = philox_words(seed, first, tl.load(step_key_ptr + STEP), ROUND, BLOCK) & 0xFFFF
        bits = w.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, (bits + noise) & 0xFFFF0000, bits)
        tl.store(w_ptr + i, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)
    elif low_ptr is not None:
        hi, low = split_master(w)
        tl.store(w_ptr + i, hi, mask=mask)
        tl.store(low_ptr + i, low, mask=mask)
    else:
        tl.store(w_ptr + i, w, mask=mask)
