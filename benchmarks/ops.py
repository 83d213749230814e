"""Where a step's time goes, and where it could not go faster: `python -m gpt2_triton bench --ops`.

Every launcher of a step is timed in place, between CUDA events, and grouped with those of equal shapes.  Beside it
stands its floor: the time of its arithmetic at the rate at which cuBLAS multiplies that very shape and layout on this
GPU in this run (for attention, cuDNN's time), or of its bytes at the bandwidth of a large copy, whichever is longer.
Bytes are the launcher's inputs read once and its outputs written once; recomputation and partial sums are its own.
"""

import collections
import dataclasses
import inspect
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpt2_triton.kernels as kernels
from benchmarks.sizes import SIZES, T, config_of, tokens_of
from gpt2_triton.data.loader import pack_batch
from gpt2_triton.model import GPT2
from gpt2_triton.optim import hyper_row

Arguments = dict[str, Any]
WORKSPACE = {"scratch", "rowsum", "delta"}
IN_PLACE = {"adamw": ("w", "m", "v", "low"), "layernorm_bwd": ("dx",)}  # outputs that are read as well
GATHERED = {"encoder_fwd", "classifier_target", "encoder_bwd"}  # of wte only the rows of tokens

# launcher -> (M, N, K) of its product, and its layout: forward a @ w.T, dX a @ w, dW a.T @ b
PRODUCTS: dict[str, tuple[Callable[[Arguments], tuple[int, int, int]], str]] = {
    "matmul": (lambda a: (*a["out"].shape, a["inp"].shape[1]), "forward"),
    "matmul_gelu": (lambda a: (*a["out"].shape, a["inp"].shape[1]), "forward"),
    "matmul_add": (lambda a: (*a["out"].shape, a["inp"].shape[1]), "forward"),
    "matmul_dx": (lambda a: (*a["dinp"].shape, a["dout"].shape[1]), "dx"),
    "matmul_dx_dgelu": (lambda a: (*a["dpre"].shape, a["dout"].shape[1]), "dx"),
    "matmul_dw": (lambda a: (*a["dw"].shape, a["inp"].shape[0]), "dw"),
    "classifier_fwd": (lambda a: (a["lnf"].shape[0], *a["wte"].shape), "forward"),
    "classifier_dx": (lambda a: (*a["dln"].shape, a["p"].shape[1]), "dx"),
}


def product(name: str, a: Arguments) -> tuple[str, int, int, int] | None:
    if name not in PRODUCTS:
        return None
    sizes, layout = PRODUCTS[name]
    return layout, *sizes(a)


def flops(name: str, a: Arguments) -> int:
    """Multiplications and additions of products; causal attention has 2 of half its scores forward, 5 backward."""
    if name in PRODUCTS:
        return 2 * math.prod(PRODUCTS[name][0](a))
    if name.startswith("attention"):
        B, NH, T = a["lse"].shape
        return (2 if name == "attention_fwd" else 5) * B * T * T * a["out"].shape[1]
    return 0


def moved_bytes(name: str, a: Arguments, acc: bool) -> int:
    """Each tensor once; what is updated in place, or added to when the launcher accumulates, twice."""
    total = 0
    for argument, value in a.items():
        if not isinstance(value, Tensor) or argument in WORKSPACE:
            continue
        n = value.numel() * value.element_size()
        if argument in ("wte", "dwte") and name in GATHERED:
            rows = a["targets"].numel() if "targets" in a else a["order" if "order" in a else "ids"].numel()
            n = min(n, rows * value.shape[1] * value.element_size())
        twice = argument in IN_PLACE.get(name, ()) or (acc and argument in ("dw", "losses")) or argument == "dwte"
        total += n * (2 if twice else 1)
    return total


@dataclasses.dataclass
class Operation:
    """Calls of one launcher with equal shapes, over all measured steps."""

    name: str
    shapes: str
    flops: int
    nbytes: int
    product: tuple[str, int, int, int] | None
    attention: tuple[int, int, int, int] | None
    spans: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


class Timed:
    """The kernel package, with an event on either side of each launch while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.operations: dict[tuple[str, str], Operation] = {}

    def __getattr__(self, name: str) -> Any:
        launcher = getattr(kernels, name)
        if not callable(launcher) or name in ("scratch_elements", "compiling"):
            return launcher

        def call(*args: Any, **keywords: Any) -> None:
            if not self.on:
                return launcher(*args, **keywords)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            launcher(*args, **keywords)
            after.record()
            self._operation(name, launcher, args, keywords).spans.append((before, after))

        return call

    def _operation(self, name: str, launcher: Any, args: tuple, keywords: dict) -> Operation:
        a = inspect.signature(launcher).bind(*args, **keywords).arguments
        shapes = " ".join(
            "x".join(map(str, v.shape)) for k, v in a.items() if isinstance(v, Tensor) and k not in WORKSPACE
        )
        key = (name, shapes + str(a.get("acc", "")))
        if key not in self.operations:
            sizes = (*a["lse"].shape, a["out"].shape[1] // a["lse"].shape[1]) if name.startswith("attention") else None
            nbytes = moved_bytes(name, a, bool(a.get("acc", False)))
            self.operations[key] = Operation(name, shapes, flops(name, a), nbytes, product(name, a), sizes)
        return self.operations[key]


def median_ms(function: Callable[[], Any], repeats: int = 30) -> float:
    """Median of `repeats` runs, all launched before the first begins, so that no launch is part of a time."""
    function()
    torch.cuda._sleep(200_000_000)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks[:-1], marks[1:]))


class Ceilings:
    """What this GPU can do, measured on random numbers: copies, cuBLAS at each shape, cuDNN's attention."""

    def __init__(self) -> None:
        a = torch.randn(1 << 28, device="cuda")
        b = torch.empty_like(a)
        self.copy_bandwidth = 2 * a.nbytes / median_ms(lambda: b.copy_(a)) * 1e3
        self._ms: dict[Any, float] = {}

    def product_ms(self, layout: str, M: int, N: int, K: int) -> float:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda").bfloat16()

        if (layout, M, N, K) not in self._ms:
            a, w = (
                (random(K, M).T if layout == "dw" else random(M, K)),
                (random(N, K).T if layout == "forward" else random(K, N)),
            )
            out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
            self._ms[layout, M, N, K] = median_ms(lambda: torch.mm(a, w, out=out))
        return self._ms[layout, M, N, K]

    def attention_ms(self, name: str, B: int, NH: int, T: int, HS: int) -> float:
        if (name, B, NH, T, HS) not in self._ms:
            q, k, v, d = (torch.randn(B, T, NH, HS, device="cuda").bfloat16().transpose(1, 2) for _ in range(4))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                if name == "attention_fwd":
                    run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
                else:
                    inputs = [t.requires_grad_() for t in (q, k, v)]
                    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
                    run = lambda: torch.autograd.grad(out, inputs, d, retain_graph=True)  # noqa: E731
                self._ms[name, B, NH, T, HS] = median_ms(run)
        return self._ms[name, B, NH, T, HS]

    def floor_ms(self, op: Operation) -> float:
        moving = op.nbytes / self.copy_bandwidth * 1e3
        if op.product:
            return max(moving, self.product_ms(*op.product))
        return max(moving, self.attention_ms(op.name, *op.attention)) if op.attention else moving


def measure(size: str, batch: int, recompute: str, steps: int) -> tuple[list[Operation], float]:
    """The operations of a step with their events, and the milliseconds of a step replayed as CUDA graphs."""
    config, timed = config_of(size, batch, recompute), Timed()
    model = GPT2(config, timed, "cuda")
    model.compile()
    model.initialise(config.train.seed)
    packed = pack_batch(None, *tokens_of(batch), config.model.vocab_size).pin_memory()
    hyper = hyper_row(0, config, 1.0 / config.total_batch_tokens)

    def step(number: int) -> float:
        model.begin_step(hyper, number, config.train.seed)
        model.micro_step(packed, first=True)
        return model.end_step().result().seconds * 1e3

    replayed = statistics.median([step(i) for i in range(steps + 3)][3:])
    model.eager = timed.on = True
    for i in range(steps):
        torch.cuda._sleep(200_000_000)  # 0.1 s, so that launches are queued before the first one runs
        step(i)
    return list(timed.operations.values()), replayed


def report(size: str, batch: int | None, recompute: str | None, plot: Path | None, steps: int = 5) -> None:
    """Measure, print the table, and draw it."""
    B, recompute = batch or SIZES[size].batch, recompute or SIZES[size].recompute
    operations, step_ms = measure(size, B, recompute, steps)
    rows = [(op, len(op.spans) / steps, statistics.median(a.elapsed_time(b) for a, b in op.spans)) for op in operations]
    ceilings = Ceilings()
    floors = {id(op): ceilings.floor_ms(op) for op in operations}
    rows.sort(key=lambda row: -row[1] * row[2])
    print(f"{size}, B {B}, T {T}, recompute {recompute}; copy {ceilings.copy_bandwidth / 1e12:.2f} TB/s")
    print(table([(*row, floors[id(row[0])]) for row in rows], step_ms))
    if plot:
        draw([(*row, floors[id(row[0])]) for row in rows], step_ms, f"{size}, B {B}", plot)
        print(f"wrote {plot}")


def table(rows: list[tuple[Operation, float, float, float]], step_ms: float) -> str:
    """One line an operation: calls a step, ms a call, work, rates, the floor, and shares."""
    head = ["operation", "shape", "calls", "ms", "GFLOP", "MB", "TFLOP/s", "GB/s", "floor ms", "of limit", "of step"]
    lines = [head]
    for op, calls, ms, floor in rows:
        shape = "x".join(map(str, op.product[1:])) if op.product else op.shapes.split(" ")[0]
        line = [op.name, shape, f"{calls:g}", f"{ms:.3f}", f"{op.flops / 1e9:.1f}", f"{op.nbytes / 1e6:.1f}"]
        line += [f"{op.flops / ms / 1e9:.0f}" if op.flops else "", f"{op.nbytes / ms / 1e6:.0f}"]
        lines.append(line + [f"{floor:.3f}", f"{floor / ms:.0%}", f"{calls * ms / step_ms:.1%}"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines
    ]
    total, floor = sum(c * ms for _, c, ms, _ in rows), sum(c * f for _, c, _, f in rows)
    return "\n".join(
        [
            *text,
            f"sum of operations {total:.1f} ms; sum of floors {floor:.1f} ms; step {step_ms:.1f} ms = "
            f"{step_ms / floor:.3f}x the floors",
        ]
    )


def draw(rows: list[tuple[Operation, float, float, float]], step_ms: float, title: str, out: Path) -> None:
    """Bars: the milliseconds of each kind of operation in a step, and its floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ms, floors = collections.Counter[str](), collections.Counter[str]()
    for op, calls, each, floor in rows:
        ms[op.name] += calls * each
        floors[op.name] += calls * floor
    names = [name for name, value in ms.most_common() if value > 0.003 * step_ms][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.36 * len(names) + 1.4), layout="constrained")
    axes.barh(names, [ms[n] for n in names], color="#9db7d5", label="measured")
    axes.barh(names, [floors[n] for n in names], color="#1f4e79", height=0.4, label="floor")
    for i, name in enumerate(names):
        axes.text(ms[name], i, f"  {ms[name]:.1f} ms, {floors[name] / ms[name]:.0%}", va="center", fontsize=8)
    axes.set(xlabel="ms in a step", title=f"{title}: step {step_ms:.1f} ms, floors {sum(floors.values()):.1f} ms")
    axes.set_xlim(0, 1.18 * max(ms.values()))
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)
