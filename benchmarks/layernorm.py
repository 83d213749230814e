"""Layernorm at GPT-2's sizes beside copies: `python -m benchmarks.layernorm`.

In bf16, each launch replayed as a graph, as in a step, and timed as ceilings.py times.  The backward pass includes the
launch that finishes its three sums; "again" is the one that also writes the norm's output once more.  Beside each a
copy of as many bytes: a short one ends before it gets to the bandwidth of a long one.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

import gpt2_triton.kernels as K
from benchmarks.ceilings import copy_bandwidth, median_ms
from benchmarks.sizes import SIZES, T
from gpt2_triton.model.cuda import capture


def graph_ms(launch: Callable[[], None]) -> float:
    """Milliseconds of a launch, replayed as a graph: to launch these kernels from Python takes longer than they do."""
    launch()
    return median_ms(capture(launch).replay)


def copy_ms(nbytes: int, device: str) -> float:
    """A copy that reads and writes so many bytes in all."""
    source = torch.randint(-128, 128, (nbytes // 2,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return median_ms(lambda: target.copy_(source))


def launches(R: int, C: int, device: str) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(name, bytes, launch) on random numbers."""
    x, dout, dx, ln = (torch.randn(R, C, device=device).to(torch.bfloat16) for _ in range(4))
    w, b = (torch.randn(C, device=device).to(torch.bfloat16) for _ in range(2))
    mean, rstd = torch.empty(R, device=device), torch.empty(R, device=device)
    dw, db, dbias = (torch.empty(C, device=device) for _ in range(3))
    scratch = torch.empty(K.layernorm_bwd_scratch(R, C, "bf16"), device=device)

    def backward(again: torch.Tensor | None) -> None:
        K.layernorm_bwd(dx, dw, db, dbias, again, scratch, dout, x, w, b, mean, rstd, False)

    yield "forward", 2 * x.nbytes, lambda: K.layernorm_fwd(ln, mean, rstd, x, w, b)
    yield "backward", 4 * x.nbytes, lambda: backward(None)
    yield "backward, again", 5 * x.nbytes, lambda: backward(ln)


def report(shapes: Iterable[tuple[int, int]], device: str) -> Iterator[str]:
    """The table, line by line."""
    longest = copy_bandwidth()
    yield f"a copy of 1 GiB: {longest / 1e12:.2f} TB/s"
    yield f"{'layernorm':<18}{'rows x C':>14}{'us':>9}{'TB/s':>7}{'of it':>7}{'copy, us':>10}{'of it':>7}"
    for R, C in shapes:
        for name, nbytes, launch in launches(R, C, device):
            ms, copy = graph_ms(launch), copy_ms(nbytes, device)
            rate = nbytes / ms * 1e3
            numbers = f"{ms * 1e3:>9.1f}{rate / 1e12:>7.2f}{rate / longest:>7.0%}{copy * 1e3:>10.1f}{copy / ms:>7.0%}"
            yield f"{name:<18}{f'{R} x {C}':>14}" + numbers


if __name__ == "__main__":
    for line in report([(size.batch * T, size.n_embd) for size in SIZES.values()], "cuda"):
        print(line, flush=True)
