"""Times each operation of a training step and compares it with its
floor: `python -m benchmarks ops`.

Each launch is timed between events in a replayed CUDA graph, so caches and clock are
as in a step.  (The power limit lowers the clock of a busy GPU by about 10%.)  Launches
with equal shapes are grouped.  The step is timed in a graph without events, so it may take less
time than its operations.

A floor is the longer of two times, which this run measures on this GPU.  The library's time is for
the same shape and layout: cuBLAS for products, torch._scaled_mm for products in fp8, cuDNN for
attention.  The copy's time is for the same bytes: each input read once, each output written once,
without recomputation, partial sums and transpositions in fp8.  Operations without a product have
the copy's time alone.  If a kernel beats the library, its floor/ms is above 100%.
The GPU's energy counter gives the joules of a whole step.
"""

import collections
import dataclasses
import gc
import inspect
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gpt2_triton.kernels as kernels
from benchmarks.layout import aligned
from benchmarks.speed import floors
from benchmarks.speed.energy import Power
from benchmarks.speed.our_gpt2 import begun, packed_batch, run_steps
from benchmarks.speed.sizes import SIZES, Work
from gpt2_triton import device
from gpt2_triton.model.compiling import compile_run
from gpt2_triton.model.model import Model

Arguments = dict[str, Any]
WORKSPACE = {"scratch", "rowsum", "delta"}
# outputs that the launch also reads
IN_PLACE = {"adamw": ("w", "m", "v", "low"), "embedding_bwd": ("dwte",), "dropout": ("x",)}
# outputs that the launch also reads if `acc` is true
ACCUMULATED = {"dw", "dw2", "db", "dbias", "dwpe", "losses"}
WARMUP = 10  # steps that are not counted: the clock settles within a second
# operations that touch only the tokens' rows of wte, and the input that numbers the rows
GATHERED = {
    "embedding_fwd": "ids",
    "classifier_target": "targets.ids",
    "embedding_bwd": "tokens.order",
}

# launcher: layout of its product, output of M x N, and input with K.
# forward: a @ w.T, dX: a @ w, dW: a.T @ b
PRODUCTS = {
    "matmul": ("forward", "out", "inp"),
    "matmul_rope": ("forward", "out", "inp"),
    "matmul_swiglu": ("forward", "pre", "inp"),
    "matmul_act": ("forward", "out", "inp"),
    "matmul_add": ("forward", "out", "inp"),
    "matmul_dx": ("dx", "dinp", "dout"),
    "matmul_dx_dact": ("dx", "dpre", "dout"),
    "matmul_dw": ("dw", "dw", "inp"),
    "classifier_fwd": ("forward", "p", "lnf"),
    "classifier_dx": ("dx", "dln", "p"),
}
# these read the bf16 tensor of an operand (`value`), not its fp8 form (`rows`)
READ_IN_FULL = {"attention_bwd", "classifier_loss", "embedding_fwd", "embedding_bwd"}


def is_fp8(name: str, a: Arguments) -> bool:
    """Return whether a launch multiplies fp8 operands."""
    return name not in READ_IN_FULL and any(isinstance(value, kernels.Fp8) for value in a.values())


def products(name: str, a: Arguments) -> list[tuple[str, int, int, int]]:
    """Return the layout, M, N and K of each product of a launch."""
    if name == "matmul_dw_pair":
        return [("dw", *a[dw].shape, a["inp"].shape[0]) for dw in ("dw", "dw2")]
    if name not in PRODUCTS:
        return []
    layout, out, inp = PRODUCTS[name]
    return [(layout, *a[out].shape, a[inp].shape[layout != "dw"])]


def forms(name: str, operand: Any, output: bool) -> list[Tensor]:
    """Return the tensors of an fp8 operand that a launch reads or, if `output`, writes.
    A cast only reads `value`.
    """
    if not output:
        stored = operand.rows if len(operand.rows) else operand.columns
        return [operand.value if name in READ_IN_FULL and operand.value is not None else stored]
    value = None if name.startswith("cast") else operand.value
    # att.T: attention_bwd
    more = [operand.columns] if operand.transposed and name != "attention_fwd" else []
    return [operand.rows, *more, *([] if value is None else [value])]


def flops(name: str, a: Arguments) -> int:
    """Return multiplications plus additions.  Causal attention takes 2 half
    products, its backward pass 5.
    """
    if name.startswith("attention"):
        B, NH, T = a["lse"].shape
        return (2 if name == "attention_fwd" else 5) * B * T * T * a["out"].shape[1]
    return sum(2 * math.prod(sizes) for _, *sizes in products(name, a))


def attention_sizes(a: Arguments) -> tuple[int, ...]:
    """Return B, NH, NKV, T and HS."""
    B, NH, T = a["lse"].shape
    HS = a["out"].shape[1] // NH
    return B, NH, (a["qkv"].shape[1] // HS - NH) // 2, T, HS


def moved_bytes(name: str, args: tuple, acc: bool) -> int:
    """Return the bytes that are read and written.  A tensor counts twice if it is
    updated in place or, if `acc`, added to.
    """
    contract = getattr(kernels, name).contract
    outputs = contract.outputs(args)
    inputs = contract.inputs(args)
    updated = set(IN_PLACE.get(name, ()))
    updated |= ACCUMULATED if acc else set()
    total = 0
    for argument, value in (outputs | inputs).items():
        field = argument.rpartition(".")[2]
        if field in WORKSPACE:
            continue
        written = argument in outputs
        tensors = [value] if isinstance(value, Tensor) else forms(name, value, written)
        n = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if argument in ("wte", "dwte") and name in GATHERED:
            rows = inputs[GATHERED[name]].numel()
            n = min(n, rows * value.shape[1] * tensors[0].element_size())
        total += 2 * n if field in updated else n
    return total


@dataclasses.dataclass
class Operation:
    """The calls of one launcher with equal shapes and bytes in all measured steps."""

    name: str
    shapes: str
    flops: int
    nbytes: int
    products: list[tuple[str, int, int, int]]
    attention: tuple[int, ...] | None
    fp8: bool = False  # the operands are fp8
    # events around each call in a step
    spans: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    ms: list[float] = dataclasses.field(default_factory=list)


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Return two events that a CUDA graph records at each replay."""
    return torch.cuda.Event(enable_timing=True, external=True), torch.cuda.Event(
        enable_timing=True, external=True
    )


class Timed:
    """The kernel package with an event before and after each launch while `on()` is true."""

    def __init__(self, on: Callable[[], bool]) -> None:
        self.on = on
        self.operations: dict[tuple[str, str, int], Operation] = {}

    def __getattr__(self, name: str) -> Any:
        launcher = getattr(kernels, name)
        if not hasattr(launcher, "contract"):
            return launcher

        def call(*args: Any, **keywords: Any) -> None:
            if not self.on():
                return launcher(*args, **keywords)
            before, after = events()
            before.record()
            launcher(*args, **keywords)
            after.record()
            self._operation(name, launcher, args, keywords).spans.append((before, after))

        return call

    def _operation(self, name: str, launcher: Any, args: tuple, keywords: dict) -> Operation:
        a = inspect.signature(launcher).bind(*args, **keywords).arguments
        acc = a.get("acc", False)
        a = launcher.contract.outputs(args) | launcher.contract.inputs(args)
        shapes = " ".join(
            "x".join(map(str, t.shape)) for argument, t in a.items() if argument not in WORKSPACE
        )
        nbytes = moved_bytes(name, args, acc)
        key = (name, shapes, nbytes)
        if key not in self.operations:
            sizes = attention_sizes(a) if name.startswith("attention") else None
            fp8 = is_fp8(name, a)
            self.operations[key] = Operation(
                name, shapes, flops(name, a), nbytes, products(name, a), sizes, fp8
            )
        return self.operations[key]


def floor(op: Operation) -> tuple[float, str]:
    """Return the floor of a call on this GPU in milliseconds, and the name of what sets it."""
    found = [(op.nbytes / floors.copy_bandwidth() * 1e3, "copy")]
    if op.products and op.fp8:
        times = [
            floors.scaled_product_ms(*sizes, fast=layout != "dw") for layout, *sizes in op.products
        ]
        found.append((sum(times), f"{floors.PRODUCTS_BY} fp8"))
    elif op.products:
        found.append(
            (sum(floors.product_ms(*product) for product in op.products), floors.PRODUCTS_BY)
        )
    if op.attention:
        found.append((floors.attention_ms(op.name, *op.attention), floors.ATTENTION_BY))
    return max(found)


class OpTime(NamedTuple):
    """An operation's calls per step, milliseconds per call, floor per
    call and what sets the floor.
    """

    op: Operation
    calls: int
    ms: float
    floor: float
    by: str


class Step(NamedTuple):
    """The milliseconds and the joules of a whole step; joules are None
    if they cannot be measured.
    """

    ms: float
    joules: float | None


def measure(work: Work, steps: int) -> tuple[list[Operation], Step]:
    """Return the operations of a step with their times, and the step's time and energy."""
    config = work.config()
    timed = Timed(on=lambda: False)
    model = Model(config, timed, "cuda")
    compile_run(model)
    packed = packed_batch(config)
    list(run_steps(begun(model, packed), packed, range(WARMUP)))
    with Power() as power:
        results = [
            result.seconds for result in run_steps(model, packed, range(WARMUP, WARMUP + steps))
        ]
    model.release_graphs()  # the next graphs have events
    timed.on = torch.cuda.is_current_stream_capturing
    list(run_steps(model, packed, range(1)))
    for number in range(steps):  # read the events after each step: a replay overwrites their times
        list(run_steps(model, packed, range(number, number + 1)))
        for op in timed.operations.values():
            op.ms += [before.elapsed_time(after) for before, after in op.spans]
    seconds = statistics.median(results)
    return list(timed.operations.values()), Step(seconds * 1e3, power.joules(seconds))


def report(works: list[Work], out: Path | None, steps: int = 10) -> None:
    """Measure each work and print its table, then write the figures of all to `out`."""
    found = []
    for work in works:
        operations, step = measure(work, steps)
        gc.collect()  # frees the arena before the next one is allocated
        torch.cuda.empty_cache()
        rows = [
            OpTime(op, len(op.spans), statistics.median(op.ms), *floor(op)) for op in operations
        ]
        rows.sort(key=lambda row: -row.calls * row.ms)
        title = (
            f"{work.size}, B {work.batch}, T {SIZES[work.size].T}, "
            f"{work.precision}, recompute {work.recompute}"
        )
        print(f"{title}; {device.name()}, copy {floors.copy_bandwidth() / 1e12:.2f} TB/s")
        print(table(rows, step))
        found.append(dict(gpu=device.name()) | figures(rows, step))
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: list[OpTime], step: Step) -> str:
    """Return one line per operation: calls per step, ms per call and step, work, rates,
    floor, shares; then sums.
    """
    head = "operation,shape,calls,ms,ms per step,GFLOP,MB,TFLOP/s,GB/s,floor ms,by,floor/ms,of step"
    lines = [head.split(",")]
    for op, calls, ms, least, by in rows:
        shape = (
            " ".join("x".join(map(str, sizes)) for _, *sizes in op.products)
            or op.shapes.split(" ")[0]
        )
        line = [
            op.name,
            shape,
            str(calls),
            f"{ms:.3f}",
            f"{calls * ms:.2f}",
            f"{op.flops / 1e9:.1f}",
        ]
        line += [f"{op.nbytes / 1e6:.1f}", f"{op.flops / ms / 1e9:.0f}" if op.flops else "-"]
        line += [f"{op.nbytes / ms / 1e6:.0f}", f"{least:.3f}", by]
        lines.append([*line, f"{least / ms:.0%}", f"{calls * ms / step.ms:.1%}"])
    total = sum(row.calls * row.ms for row in rows)
    least = sum(row.calls * row.floor for row in rows)
    if step.joules is None:
        energy = ""
    else:
        energy = f", {step.joules:.1f} J, {step.joules / step.ms * 1e3:.0f} W"
    measured = f"operations {total:.1f} ms, step {step.ms:.1f} ms{energy}"
    beside = f"floors {least:.1f} ms; operations {total / least:.3f}x, step {step.ms / least:.3f}x"
    return "\n".join([aligned(lines, left=(0, 1)), measured, beside])


def figures(rows: list[OpTime], step: Step) -> dict[str, Any]:
    """Return the milliseconds of a step and of each kind of operation, with their floors."""
    ms = collections.Counter[str]()
    least = collections.Counter[str]()
    for row in rows:
        ms[row.op.name] += row.calls * row.ms
        least[row.op.name] += row.calls * row.floor
    kinds = [dict(name=name, ms=ms[name], floor_ms=least[name]) for name, _ in ms.most_common()]
    return dict(
        step_ms=step.ms, joules=step.joules, floors_ms=sum(least.values()), operations=kinds
    )
