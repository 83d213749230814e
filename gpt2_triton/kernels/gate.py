"""SwiGLU of a gate and a value, and its gradients; swiglu.py has the formulas."""

import triton
import triton.language as tl


@triton.jit
def swiglu(g, u):
    return g * tl.sigmoid(g) * u


@triton.jit
def dswiglu(dh, g, u):
    """Return the gradients of g and u, from that of swiglu."""
    s = tl.sigmoid(g)
    return dh * u * s * (1.0 + g * (1.0 - s)), dh * g * s
