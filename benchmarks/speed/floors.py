"""Measures on this GPU what sets floors: the bandwidth of a copy, products of
cuBLAS, attention of cuDNN.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# the libraries that set floors; torch for AMD has its own flash attention in place of cuDNN
PRODUCTS_BY, ATTENTION_BY = ("hipBLAS", "flash") if torch.version.hip else ("cuBLAS", "cuDNN")
ATTENTION = SDPBackend.FLASH_ATTENTION if torch.version.hip else SDPBackend.CUDNN_ATTENTION
AHEAD = 1_000_000  # cycles that the GPU waits, 0.5 ms: the host needs up to 0.2 ms for a launch


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def median_ms(function: Callable[[], Any], milliseconds: float = 150.0) -> float:
    """Return the median time of a call over `milliseconds` of calls, after
    a warm-up of the same length.

    Calls follow each other without a pause: after a pause the clock would be
    higher than it is in a step.
    """

    def timed(calls: int) -> list[float]:
        torch.cuda._sleep(AHEAD)
        spans = [events() for _ in range(calls)]
        for before, after in spans:
            before.record()
            function()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in spans]

    calls = max(5, round(milliseconds / min(timed(5))))
    return statistics.median(timed(2 * calls)[calls:])


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


# Each floor is measured once, on random numbers: zeros would take less power, and so less time.


@functools.cache
def copy_bandwidth() -> float:
    """Return the bytes per second, read plus written, of a copy of 1 GiB."""
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / median_ms(lambda: b.copy_(a)) * 1e3


@functools.cache
def product_ms(layout: str, M: int, N: int, K: int) -> float:
    """Return the time of torch.mm, bf16 in and out: forward is a @ w.T,
    dx is a @ w, dw is a.T @ b.
    """
    a = _random(K, M).T if layout == "dw" else _random(M, K)
    b = _random(N, K).T if layout == "forward" else _random(K, N)
    out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
    return median_ms(lambda: torch.mm(a, b, out=out))


@functools.cache
def scaled_product_ms(M: int, N: int, K: int, fast: bool) -> float:
    """Return the time of torch._scaled_mm, a @ w.T of e4m3 [M, K] and [N, K].

    If `fast`, tensor cores sum in their own precision and the result is bf16.  Else
    sums and result are fp32: dW.
    """
    a, w = (_random(rows, K).to(torch.float8_e4m3fn) for rows in (M, N))
    scale = torch.ones((), device="cuda")
    dtype = torch.bfloat16 if fast else torch.float32
    return median_ms(
        lambda: torch._scaled_mm(a, w.t(), scale, scale, out_dtype=dtype, use_fast_accum=fast)
    )


@functools.cache
def attention_ms(name: str, B: int, NH: int, NKV: int, T: int, HS: int) -> float:
    """Return the time of the library's causal attention, forward or backward; NKV
    heads have keys and values.
    """
    q, k, v, dout = (_random(B, T, heads, HS).transpose(1, 2) for heads in (NH, NKV, NKV, NH))
    attention = functools.partial(
        F.scaled_dot_product_attention, is_causal=True, enable_gqa=NKV < NH
    )
    with sdpa_kernel(ATTENTION):
        if name == "attention_fwd":
            return median_ms(lambda: attention(q, k, v))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = attention(q, k, v)
        return median_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
