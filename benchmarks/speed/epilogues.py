"""Times products with an epilogue beside the plain product of their shape, in turns.

    python -m benchmarks.as_gpu a100 benchmarks.speed.epilogues

The record's section `epilogues` has for each epilogue and size the time that it adds, as a share
of the plain product's.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gpt2_triton.kernels as kernels
from benchmarks.record import CURRENT, Target
from benchmarks.speed.floors import median_ms
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.operands import Linear, Targets

TURNS, MILLISECONDS = 4, 200.0

app = make_app("python -m benchmarks.speed.epilogues", "Products with an epilogue.")


class Shape(NamedTuple):
    rows: int  # of a step
    C: int
    head_rows: int  # that the head multiplies at once
    vocabulary: tuple[int, int] = (50_257, 50_304)  # and with the padding


SHAPES = {"d12": Shape(65_536, 768, 11_264), "d48": Shape(16_384, 1_600, 10_112)}


class Pair(NamedTuple):
    """A product with an epilogue, and the plain one of its shape."""

    call: Callable[[], None]
    plain: Callable[[], None]


def pairs(shape: Shape, device: str = "cuda") -> dict[str, Pair]:
    """Return the pairs of a size by the name of the epilogue."""

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*sizes, device=device)).bfloat16()

    def weights(*sizes: int) -> Tensor:
        return random(*sizes, scale=0.02)  # as they begin

    R, C, head_rows, (V, padded) = shape
    x = random(R, C)
    h = random(R, 4 * C)
    out = torch.empty_like(x)
    wide = torch.empty_like(h)
    up = Linear(weights(4 * C, C), weights(4 * C))
    down = Linear(weights(C, 4 * C), weights(C))
    dbias = torch.zeros(4 * C, device=device)
    part = torch.empty(kernels.matmul_dx_dact_scratch(R, 4 * C, "bf16"), device=device)
    lnf = random(head_rows, C)
    wte = weights(padded, C)
    p = random(head_rows, padded)
    ids = torch.arange(head_rows, device=device, dtype=torch.int32)
    targets = Targets(ids, torch.zeros(head_rows, device=device))
    sums = torch.empty(kernels.classifier_fwd_scratch(head_rows, padded, "bf16"), device=device)
    return {
        "residual": Pair(
            lambda: kernels.matmul_add(out, x, h, down), lambda: kernels.matmul(out, h, down)
        ),
        "gelu": Pair(
            lambda: kernels.matmul_act(wide, h, x, up, "gelu"), lambda: kernels.matmul(wide, x, up)
        ),
        "dgelu": Pair(
            lambda: kernels.matmul_dx_dact(wide, dbias, None, part, x, down, h, False, "gelu"),
            lambda: kernels.matmul_dx(wide, x, down),
        ),
        "exponentials": Pair(
            lambda: kernels.classifier_fwd(p, sums, lnf, wte, targets, V),
            lambda: kernels.matmul(p, lnf, Linear(wte)),
        ),
    }


@app.default
def measure(*, target: Target = CURRENT) -> None:
    """Measure all pairs, and write the record's section `epilogues`."""
    figures: dict[str, Any] = {}
    for size, shape in SHAPES.items():
        for name, pair in pairs(shape).items():
            turns = [[median_ms(call, MILLISECONDS) for call in pair] for _ in range(TURNS)]
            ms, plain = map(statistics.median, zip(*turns))
            print(f"{size} {name}: {ms:.4f} ms, plain {plain:.4f} ms", flush=True)
            figures[f"{name}.{size}"] = round(ms / plain - 1, 4)
            target.write("epilogues", figures, "torch", "triton")


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
