"""SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202) of a gate g and a value u, with s = sigmoid(g):

forward    h  = g * s * u
backward   dg = dh * u * s * (1 + g * (1 - s)),  du = dh * g * s

A row of `pre` holds F gates, then F values.  The kernels are bound by bandwidth.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.tuning import INTERPRET, next_power_of_2


@triton.jit
def _swiglu_kernel(out_ptr, pre_ptr, n, F, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = i // F * (2 * F) + i % F
    g = tl.load(pre_ptr + at, mask=i < n, other=0.0).to(tl.float32)
    u = tl.load(pre_ptr + at + F, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, g * tl.sigmoid(g) * u, mask=i < n)


@triton.jit
def _swiglu_bwd_kernel(dpre_ptr, dout_ptr, pre_ptr, n, F, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = i // F * (2 * F) + i % F
    dh = tl.load(dout_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    g = tl.load(pre_ptr + at, mask=i < n, other=0.0).to(tl.float32)
    u = tl.load(pre_ptr + at + F, mask=i < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dpre_ptr + at, dh * u * s * (1.0 + g * (1.0 - s)), mask=i < n)
    tl.store(dpre_ptr + at + F, dh * g * s, mask=i < n)


def _block(n: int) -> int:
    return min(next_power_of_2(n), 1 << 18) if INTERPRET else 1024


@contract("out[R,F] <- pre[R,2*F]")
def swiglu(out: Tensor, pre: Tensor) -> None:
    """Write out = silu(gate) * value, of the two halves of pre's rows."""
    n, block = out.numel(), _block(out.numel())
    _swiglu_kernel[(triton.cdiv(n, block),)](out, pre, n, out.shape[1], BLOCK=block)


@contract("dpre[R,2*F] <- dout[R,F] pre[R,2*F]")
def swiglu_bwd(dpre: Tensor, dout: Tensor, pre: Tensor) -> None:
    """Write the gradient of pre, which may take pre's place."""
    n, block = dout.numel(), _block(dout.numel())
    _swiglu_bwd_kernel[(triton.cdiv(n, block),)](dpre, dout, pre, n, dout.shape[1], BLOCK=block)
