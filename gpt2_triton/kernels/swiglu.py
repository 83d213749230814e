"""SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202) of a gate g and a
value u, with s = sigmoid(g):

forward    h  = g * s * u
backward   dg = dh * u * s * (1 + g * (1 - s)),  du = dh * g * s

A row of `pre` holds F gates, then F values.  The kernels are bound by bandwidth.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels import hopper
from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import dswiglu as dswiglu_of
from gpt2_triton.kernels.device_math import swiglu as swiglu_of
from gpt2_triton.kernels.e4m3 import quantise
from gpt2_triton.kernels.fp8 import Fp8, Operand, stored, transpose
from gpt2_triton.kernels.hopper import swiglu as hopper_swiglu
from gpt2_triton.kernels.tuning import flat_block


@triton.jit
def _swiglu_kernel(out_ptr, scale_ptr, amax_ptr, dout_ptr, pre_ptr, n, F, BLOCK: tl.constexpr):
    """Without dout, store swiglu of pre; with dout, the gradient of pre."""
    # a row: quantise takes rows
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = i // F * (2 * F) + i % F
    g = tl.load(pre_ptr + at, mask=i < n, other=0.0).to(tl.float32)
    u = tl.load(pre_ptr + at + F, mask=i < n, other=0.0).to(tl.float32)
    if dout_ptr is None:
        h = swiglu_of(g, u)
        if scale_ptr is not None:
            h = quantise(h, scale_ptr, amax_ptr)
        tl.store(out_ptr + i, h, mask=i < n)
    else:
        dh = tl.load(dout_ptr + i, mask=i < n, other=0.0).to(tl.float32)
        dg, du = dswiglu_of(dh, g, u)
        if scale_ptr is not None:
            dg = quantise(dg, scale_ptr, amax_ptr)
            du = quantise(du, scale_ptr, amax_ptr)
        tl.store(out_ptr + at, dg, mask=i < n)
        tl.store(out_ptr + at + F, du, mask=i < n)


@contract("out[R,F] <- pre[R,2*F]")
def swiglu(out: Operand, pre: Tensor) -> None:
    """Write out = silu(gate) * value, of the two halves of pre's rows."""
    _launch(out, pre, None)


@contract("dpre[R,2*F] <- dout[R,F] pre[R,2*F]")
def swiglu_bwd(dpre: Operand, dout: Tensor, pre: Tensor) -> None:
    """Write the gradient of pre, which may take pre's place."""
    _launch(dpre, pre, dout)


def _launch(out: Operand, pre: Tensor, dout: Tensor | None) -> None:
    R = len(pre)
    F = pre.shape[1] // 2
    n = R * F
    rows, scale, amax = stored(out)
    if isinstance(out, Fp8) and hopper.takes("swiglu", R, F, "fp8"):
        return hopper_swiglu.launch(rows, out.columns, out.scale, amax, pre, dout)
    block = flat_block(n, 1024)
    _swiglu_kernel[(triton.cdiv(n, block),)](rows, scale, amax, dout, pre, n, F, BLOCK=block)
    if isinstance(out, Fp8):
        transpose(out.columns, rows, pairs=True)
