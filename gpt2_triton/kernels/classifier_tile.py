"""Epilogues of the classifier's products on tiles of fp32 sums, for the kernels of classifier.py and of hopper/."""

import triton
import triton.language as tl

from gpt2_triton.kernels.device_math import exp_relative


@triton.jit
def exp_relative_tile(z, zt, target, j, V):
    """Return p of a tile of logits z: exp relative to the target's logit, 0 at the target and in the padding.  zt and
    target belong to the tile's rows, j are its columns.
    """
    return exp_relative(z, zt[:, None], (j < V)[None, :] & (j[None, :] != target[:, None]))


@triton.jit
def scale_and_add_target(acc, rs, ks, target, wte_ptr, c, C):
    """Return rs * acc + ks * wte[target]; rs, ks and target belong to the tile's rows, c are its columns."""
    mask = (target >= 0)[:, None] & (c < C)[None, :]
    wte = tl.load(wte_ptr + target[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.fma(ks[:, None], wte, rs[:, None] * acc)
