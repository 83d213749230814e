"""Compares every kernel with PyTorch's own operation on the same bf16 input:
`python -m benchmarks verify`.

The error is ||got - exact|| / ||exact||; `exact` is computed in float64.  A kernel passes if its
error is at most 1.1 times PyTorch's error.  A float32 result also passes with an error below FLOOR,
a few last bits.  fp8.py has the limits of fp8.  Without a GPU the shapes are tiny, and results are
stored in float32: Triton's interpreter truncates to bf16 where a GPU rounds.
"""

from collections.abc import Iterator

import torch

from benchmarks.accuracy import fp8, kernels, llama, update
from benchmarks.accuracy.comparison import FLOOR, GPU, RATIO, STORAGE, Comparison, Sizes
from gpt2_triton import device


def comparisons() -> Iterator[Comparison]:
    s = Sizes()
    for part in (kernels, llama, update):
        yield from part.comparisons(s)
    if not GPU or device.has_fp8(device.architecture()):
        yield from fp8.comparisons(s)


def verify() -> int:
    """Print the table; return 0 if each output is within its bound, else 1."""
    torch.manual_seed(0)
    where = device.name() if GPU else "Triton's interpreter"
    print(
        "relative error against float64, "
        f"{str(STORAGE).removeprefix('torch.')} storage, on {where}\n"
    )
    print(f"{'op':<20}{'output':<13}{'shape':<16}{'ours':>10}{'PyTorch':>10}{'ratio':>10}")
    verdicts = []
    for c in comparisons():
        ours, torchs, ok = c.verdict()
        verdicts.append(ok)
        shape = " x ".join(map(str, c.ours.shape)) or "1"
        errors = f"{ours:>10.1e}{c.limit:>10.0e}{'limit':>10}"
        if torchs is not None:
            errors = (
                f"{ours:>10.1e}{torchs:>10.1e}{ours / torchs if torchs else float(ours > 0):>10.2f}"
            )
        print(f"{c.op:<20}{c.output:<13}{shape:<16}{errors}  {'ok' if ok else 'FAIL'}", flush=True)
    bound = f"{RATIO}x PyTorch's error (fp32 outputs: or {FLOOR:.0e}), or their limit"
    print(f"\n{sum(verdicts)} of {len(verdicts)} outputs are within {bound}")
    return 0 if all(verdicts) else 1
