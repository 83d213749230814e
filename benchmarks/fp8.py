"""Checks and times the fp8 kernels on this GPU, then training steps in bf16 and fp8.

python -m benchmarks.fp8 [OUT [KIND ...]]     KIND: check, time, step (all by default); OUT: the working directory

Every family of kernels is compared with float64 of the dequantised operands, at shapes of 124M and 1558M, and each
tensor that is written in two orders with its own transpose.  Times are of CUDA graphs of about 10 ms that are replayed
without a pause, in rounds whose order rotates, next to the bf16 launchers and torch._scaled_mm of the same shape.
Joules are those of the GPU's own counter.  Each part is a process of its own, which a kernel that hangs takes with it.
The tables come last; OUT/fp8.json has the rows as they come.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SHAPES = {"d12": (65536, 768), "d48": (16384, 1600)}  # rows of a micro-batch, channels
STEPS = (("d12", "gelu"), ("d12", "gelu+ln"), ("d48", "gelu+ln"))
LIMIT = {"check": 150, "time": 240, "step": 120}  # seconds of a part
Row = dict[str, Any]


def main(out: Path, kinds: list[str]) -> int:
    """Run the parts of these kinds, print the tables, and return 1 if a check failed or a part did not finish."""
    parts = [["check", family, size] for family in CHECKS for size in ("ragged", *SHAPES)]
    parts += [["time", size] for size in SHAPES]
    parts += [["step", *step, precision] for step in STEPS for precision in ("bf16", "fp8")]
    rows: dict[str, list[Row]] = {"check": [], "time": [], "step": []}
    failed = 0
    for part in (part for part in parts if part[0] in kinds):
        found, bad = _part(part)
        rows[part[0]] += found
        failed += bad
        (out / "fp8.json").write_text(json.dumps(rows, indent=1) + "\n")
    for name in kinds:
        columns = TABLES[name]
        print(f"\n{name}\n" + _table(rows[name], columns))
    return int(failed > 0 or any(not row["ok"] for row in rows["check"]))


def _part(part: list[str]) -> tuple[list[Row], bool]:
    """Run a part in a process; return its rows, and whether it failed, of which a line is printed."""
    began, command = time.time(), [sys.executable, "-m", "benchmarks.fp8", *part]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT[part[0]])
        out, error = run.stdout, run.stderr.strip().splitlines()[-6:] if run.returncode else []
    except subprocess.TimeoutExpired as ended:
        out, error = (ended.stdout or b"").decode(), [f"not finished in {LIMIT[part[0]]} s"]
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    print(f"{' '.join(part)}: {len(rows)} rows in {time.time() - began:.0f} s", *error, sep="\n  ", flush=True)
    return rows, bool(error)


TABLES = {
    "check": ["what", "shape", "error", "limit", "steps_off", "amax_error", "transposed", "ok"],
    "time": ["group", "name", "us", "tflops", "gbs", "mJ", "MHz"],
    "step": ["size", "recompute", "precision", "ms", "tok_s", "J", "GiB", "loss"],
}


def _table(rows: list[Row], columns: list[str]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


# ---- operands


def scale_for(most: float) -> float:
    return 2.0 ** math.floor(math.log2(448 / (2 * most)))


def operand(R: int, C: int, scale: float, transposed: bool = True, value: Any = None) -> Any:
    """Return an fp8 operand full of NaN that records its amax."""
    import torch

    import gpt2_triton.kernels as K

    rows, columns = (torch.full(s, 127, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn) for s in
                     ((R, C), (C, R)))  # fmt: skip
    cells = torch.zeros(K.AMAX_CELLS, device="cuda", dtype=torch.int32)
    return K.Fp8(rows, columns, torch.tensor([scale], device="cuda"), cells, transposed, value)


def random_operand(R: int, C: int, std: float = 1.0, weight: bool = False) -> Any:
    """Return an operand of normal numbers, with columns too."""
    import gpt2_triton.kernels as K
    from gpt2_triton.kernels import fp8

    x = randn(R, C, std=std)
    out = operand(R, C, scale_for(5.5 * std))
    out = fp8.Fp8(**{**vars(out), "scratch": operand(C, R, 1.0).rows.view(-1)}) if weight else out
    if weight:
        K.cast_operand(out, x)
    else:
        for r in range(0, R, 8192):
            part = (x[r : r + 8192].float() * out.scale).clamp(-448, 448)
            out.rows[r : r + 8192].copy_(part.to(out.rows.dtype))
        fp8.transpose(out.columns, out.rows, pairs=True)
    return out


def randn(*shape: int, std: float = 1.0) -> Any:
    import torch

    return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(0.0, std)


def exact(x: Any, rows: slice = slice(None)) -> Any:
    return x.rows[rows].double() / x.scale.double()


def in_order(x: Any) -> bool:
    """Return whether the columns of an operand are its rows transposed, with tokens in pairs."""
    import torch

    R = x.shape[0]
    order = torch.arange(R, device="cuda").view(-1, 2, 8).transpose(1, 2).flatten()
    rows, columns = x.rows.view(torch.uint8), x.columns.view(torch.uint8)
    return all(torch.equal(columns[:, p : p + 4096], rows[order[p : p + 4096]].T) for p in range(0, R, 4096))


# ---- checks


class Check:
    """Adds up the squared differences of an output and its exact numbers, block of rows by block of rows."""

    def __init__(self, what: str, shape: tuple[int, ...], limit: float):
        self.what, self.shape, self.limit = what, shape, limit
        self.off = self.all = self.top = 0.0
        self.steps = self.n = 0

    def add(self, got: Any, want: Any, quantised: Any = None) -> None:
        """`quantised`: the operand's numbers in e4m3 for these rows, compared with the rounding of `want`."""
        import torch

        self.off += ((got.double() - want) ** 2).sum().item()
        self.all += (want**2).sum().item()
        self.top = max(self.top, want.abs().max().item())
        if quantised is not None:
            rows, scale = quantised
            right = (want * scale).clamp(-448, 448).float().to(rows.dtype)
            self.steps += (rows.view(torch.uint8) != right.view(torch.uint8)).sum().item()
            self.n += rows.numel()

    def say(self, x: Any = None, largest_amax_error: float = 1e-2) -> None:
        import torch

        error, row = math.sqrt(self.off / self.all), dict[str, Any]()
        if x is not None:
            amax = x.amax.view(torch.float32).max().item()
            row = dict(amax_error=abs(amax / self.top - 1), steps_off=self.steps / self.n)
            row["transposed"] = in_order(x) if x.transposed else None
        ok = error < self.limit and row.get("transposed") is not False and row.get("amax_error", 0) < largest_amax_error
        say(what=self.what, shape="x".join(map(str, self.shape)), error=error, limit=self.limit, ok=ok, **row)


# The limit of an output in bf16 is its rounding, 1.7e-3, and what tensor cores drop from fp8 products; of one in e4m3
# its rounding, 2.65e-2.  A weight gradient in fp32 has only the drops of 128 terms.
BF16, E4M3, FP32 = 3e-3, 3e-2, 2e-4


def blocks(R: int) -> list[slice]:
    return [slice(r, min(r + 8192, R)) for r in range(0, R, 8192)]


def check_products(R: int, C: int) -> None:
    """qkv, fcproj with its residual, and dX of fc."""
    import gpt2_triton.kernels as K

    for what, N, k, res in (
        ("matmul", 3 * C, C, False),
        ("matmul_add", C, 4 * C, True),
        ("matmul_dx", C, 4 * C, False),
    ):
        a = random_operand(R, k)
        w = random_operand(k, N, 0.02, weight=True) if what == "matmul_dx" else random_operand(N, k, 0.02, weight=True)
        out, b, residual = randn(R, N), randn(N), randn(R, N)
        if what == "matmul_dx":
            K.matmul_dx(out, a, w)
        elif res:
            K.matmul_add(out, residual, a, w, b)
        else:
            K.matmul(out, a, w, b)
        check, matrix = Check(what, (R, N, k), BF16), exact(w) if what == "matmul_dx" else exact(w).T
        for r in blocks(R):
            want = exact(a, r) @ matrix + (0 if what == "matmul_dx" else b.double())
            check.add(out[r], want + residual[r].double() if res else want)
        check.say()


def check_dw(R: int, C: int) -> None:
    import torch

    import gpt2_triton.kernels as K
    from gpt2_triton.kernels.matmul import matmul_dw_scratch

    for N, k in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C)):
        dout, inp = random_operand(R, N), random_operand(R, k)
        dw, scratch = (
            torch.empty(N, k, device="cuda"),
            torch.empty(matmul_dw_scratch(N, k, R, "fp8") + 1, device="cuda"),
        )
        want = sum(exact(dout, r).T @ exact(inp, r) for r in blocks(R))
        for acc in (False, True):
            K.matmul_dw(dw, scratch, dout, inp, acc)
            check = Check(f"matmul_dw{', acc' * acc}", (N, k, R), FP32)
            check.add(dw, want * (1 + acc))
            check.say()


def check_gelu(R: int, C: int) -> None:
    """fc with GELU, and dX of fcproj with the derivative that it wrote."""
    import torch

    import gpt2_triton.kernels as K

    inp, w, b = random_operand(R, C), random_operand(4 * C, C, 1 / math.sqrt(C), weight=True), randn(4 * C, std=0.1)
    out, slope = operand(R, 4 * C, 32.0), torch.zeros(R, 4 * C, device="cuda", dtype=torch.uint8)
    dout, w2 = random_operand(R, C, 1e-3), random_operand(C, 4 * C, 1 / math.sqrt(C), weight=True)
    dpre, dbias = operand(R, 4 * C, scale_for(8e-3)), torch.empty(4 * C, device="cuda")
    scratch = torch.empty(K.scratch_elements(dims_of(R, C), "bf16"), device="cuda")
    K.matmul_gelu(out, slope, inp, w, b)
    K.matmul_dx_dgelu(dpre, dbias, None, scratch, dout, w2, slope, False)
    forward, backward = Check("matmul_gelu", (R, 4 * C, C), E4M3), Check("matmul_dx_dgelu", (R, 4 * C, C), E4M3)
    sums, wt, w2t = torch.zeros(4 * C, device="cuda", dtype=torch.float64), exact(w).T, exact(w2)
    for r in blocks(R):
        pre = (exact(inp, r) @ wt + b.double()).requires_grad_()
        gelu = torch.nn.functional.gelu(pre, approximate="tanh")
        [derivative] = torch.autograd.grad(gelu.sum(), pre)
        forward.add(exact(out, r), gelu.detach(), (out.rows[r], 32.0))
        want = (exact(dout, r) @ w2t) * derivative
        backward.add(exact(dpre, r), want, (dpre.rows[r], dpre.scale.item()))
        sums += want.sum(0)
    forward.say(out)
    backward.say(dpre)
    check = Check("matmul_dx_dgelu, dbias", (4 * C,), 5e-3)  # half a step of the byte in each term
    check.add(dbias, sums)
    check.say()


def dims_of(R: int, C: int) -> dict[str, int]:
    """Return sizes for scratch_elements: sequences of 1,024 tokens, or a shorter one, in heads of 64."""
    T = min(R, 1024)
    return dict(R=R, C=C, Rc=1024, Vp=50304, B=R // T, T=T, NH=C // 64, N=1 << 20, slots=1024, A=1)


def check_writers(R: int, C: int) -> None:
    """Norms, attention and weights, each next to the bf16 of the same launch, and the transposition."""
    import torch

    import gpt2_triton.kernels as K
    from gpt2_triton.kernels import fp8

    d = dims_of(R, C)
    scratch = torch.empty(K.scratch_elements(d, "bf16"), device="cuda")
    x, dout, w, b, qkv, datt = randn(R, C), randn(R, C), randn(C), randn(C), randn(R, 3 * C), randn(R, C)
    mean, rstd, sums = torch.empty(R, device="cuda"), torch.empty(R, device="cuda"), torch.empty(3, C, device="cuda")
    lse, delta = (torch.empty(d["B"], d["NH"], d["T"], device="cuda") for _ in range(2))
    dbias = torch.empty(3 * C, device="cuda")
    made = []
    for in_fp8 in (False, True):

        def place(n: int, scale: float, also_bf16: bool = False, in_fp8: bool = in_fp8) -> Any:
            full = randn(R, n)
            return operand(R, n, scale, False, full if also_bf16 else None) if in_fp8 else full

        ln, again, dx, att, dqkv = (
            place(C, 16.0),
            place(C, 16.0),
            place(C, 16.0, True),
            place(C, 32.0, True),
            place(3 * C, 32.0),
        )
        K.layernorm_fwd(ln, mean, rstd, x, w, b)
        K.layernorm_bwd(dx, *sums, again, scratch, dout, x, w, b, mean, rstd, False, add_dx=False)
        K.attention_fwd(att, lse, qkv)
        K.attention_bwd(dqkv, dbias, delta, scratch, datt, qkv, att, lse, False)
        made.append(dict(layernorm_fwd=ln, layernorm_bwd=dx, attention_fwd=att, attention_bwd=dqkv, recomputed=again))
    for name in ("layernorm_fwd", "layernorm_bwd", "attention_fwd", "attention_bwd"):
        check = Check(name, tuple(made[1][name].shape), E4M3)
        for r in blocks(R):
            check.add(exact(made[1][name], r), made[0][name][r].double())
        check.steps, check.n = 0, 1
        check.say(made[1][name], 2**-7)
    one, other = (made[1][name].rows.view(torch.uint8) for name in ("layernorm_fwd", "recomputed"))
    say(what="norm computed again", shape=f"{R}x{C}", error=(one != other).float().mean().item(), limit=0.0,
        ok=torch.equal(one, other))  # fmt: skip
    fp8.transpose(ln.columns, ln.rows, pairs=True)
    say(what="transpose", shape=f"{R}x{C}", error=0.0, limit=0.0, transposed=in_order(ln), ok=in_order(ln))
    weight = randn(4 * C, C, std=0.02)
    w8 = random_operand(4 * C, C, 0.02, weight=True)
    K.cast_operand(w8, weight)
    want = (weight.float() * w8.scale).clamp(-448, 448).to(w8.rows.dtype).view(torch.uint8)
    same = torch.equal(w8.rows.view(torch.uint8), want) and torch.equal(w8.columns.view(torch.uint8), want.T)
    say(what="cast_operand", shape=f"{4 * C}x{C}", error=0.0, limit=0.0, transposed=same, ok=same)


CHECKS: dict[str, Callable[[int, int], None]] = {
    "products": check_products, "dw": check_dw, "gelu": check_gelu, "writers": check_writers,
}  # fmt: skip


# ---- times


class Meter:
    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    def joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1e3

    def mhz(self) -> int:
        return self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)

    def watts(self, running: Callable[[], bool]) -> tuple[float, float]:
        """Return the power between the counter's changes, every 100 ms, and the median clock while `running()`."""
        samples, clocks = [], []
        while running():
            samples.append((time.perf_counter(), self.joules()))
            clocks.append(self.mhz())
            time.sleep(0.003)
        edges = [b for a, b in zip(samples, samples[1:]) if b[1] != a[1]]
        if len(edges) < 2:
            return math.nan, statistics.median(clocks or [0])
        return (edges[-1][1] - edges[0][1]) / (edges[-1][0] - edges[0][0]), statistics.median(clocks)


def captured(function: Callable[[], None]) -> tuple[Any, int]:
    """Return a graph of about 10 ms of calls, and their number."""
    import torch

    from benchmarks.ceilings import events

    for _ in range(3):
        function()
    before, after = events()
    before.record()
    for _ in range(5):
        function()
    after.record()
    torch.cuda.synchronize()
    n = max(2, round(10 / max(before.elapsed_time(after) / 5, 0.005)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            function()
    return graph, n


def compare(group: str, calls: dict[str, Callable[[], None]], flops: float = 0, nbytes: float = 0) -> None:
    """Time the calls in three rounds; print a row for each with its median."""
    import torch

    from benchmarks.ceilings import events

    meter, graphs, turns = Meter(), dict[str, tuple[Any, int]](), dict[str, list]()
    for name, call in calls.items():
        try:
            graphs[name] = captured(call)
        except RuntimeError as error:  # cuBLAS does not take every shape
            print(f"{group}, {name}: {str(error).strip().splitlines()[0]}", file=sys.stderr)
    names = list(graphs)
    for turn in range(3):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            graph, n = graphs[name]
            (before, after), (_, last) = events(), events()
            for _ in range(6):
                graph.replay()
            before.record()
            for _ in range(24):
                graph.replay()
            after.record()
            for _ in range(6):
                graph.replay()
            last.record()
            watts, mhz = meter.watts(lambda last=last: not last.query())
            turns.setdefault(name, []).append((before.elapsed_time(after) / 24 / n, watts, mhz))
            torch.cuda.synchronize()
    for name, seen in turns.items():
        ms, watts, mhz = (statistics.median(column) for column in zip(*seen))
        row: Row = dict(group=group, name=name, us=ms * 1e3, mJ=None if math.isnan(watts) else watts * ms, MHz=mhz)
        say(**row, tflops=flops / ms / 1e9 if flops else None, gbs=nbytes / ms / 1e6 if nbytes else None)


def time_kernels(R: int, C: int) -> None:
    """Compare each fp8 launcher with that of bf16, products with torch._scaled_mm too."""
    import torch

    import gpt2_triton.kernels as K
    from gpt2_triton.kernels import fp8

    def scaled(a: Any, w: Any, out_dtype: Any, fast: bool) -> Callable[[], None]:
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(a, w.t(), one, one, out_dtype=out_dtype, use_fast_accum=fast)

    def both(name: str, a: Any, w: Any, out_dtype: Any = torch.bfloat16) -> dict[str, Callable[[], None]]:
        return {
            f"{name}, _scaled_mm fast": scaled(a, w, out_dtype, True),
            f"{name}, slow": scaled(a, w, out_dtype, False),
        }

    d = dims_of(R, C)
    scratch = torch.empty(K.scratch_elements(d | dict(R=R), "bf16"), device="cuda")
    for what, N, k in (("qkv", 3 * C, C), ("attproj + res", C, C), ("fcproj + res", C, 4 * C)):
        a, w, b, out, res = random_operand(R, k), random_operand(N, k, 0.02, True), randn(N), randn(R, N), randn(R, N)
        a16, w16 = randn(R, k), randn(N, k, std=0.02)
        if what == "qkv":
            calls = {"bf16": partial(K.matmul, out, a16, w16, b), "fp8": partial(K.matmul, out, a, w, b)}
        else:
            calls = {
                "bf16": partial(K.matmul_add, out, res, a16, w16, b),
                "fp8": partial(K.matmul_add, out, res, a, w, b),
            }
        compare(f"{what} {R}x{N}x{k}", calls | both("bare", a.rows, w.rows), 2 * R * N * k)
    for what, N, k in (("dX qkv", 3 * C, C), ("dX attproj", C, C), ("dX fc", 4 * C, C)):
        a, w, out, a16, w16 = (
            random_operand(R, N),
            random_operand(N, k, 0.02, True),
            randn(R, k),
            randn(R, N),
            randn(N, k),
        )
        calls = {"bf16": partial(K.matmul_dx, out, a16, w16), "fp8": partial(K.matmul_dx, out, a, w)}
        compare(f"{what} {R}x{k}x{N}", calls | both("bare", a.rows, w.columns), 2 * R * N * k)
    for what, N, k in (("dW qkv", 3 * C, C), ("dW attproj", C, C), ("dW fc", 4 * C, C), ("dW fcproj", C, 4 * C)):
        a, w, dw, a16, w16 = (
            random_operand(R, N),
            random_operand(R, k),
            torch.empty(N, k, device="cuda"),
            randn(R, N),
            randn(R, k),
        )
        calls = {
            "bf16": partial(K.matmul_dw, dw, scratch, a16, w16, True),
            "fp8": partial(K.matmul_dw, dw, scratch, a, w, True),
        }
        compare(f"{what} {N}x{k}x{R}", calls | both("bare", a.columns, w.columns, torch.float32), 2 * R * N * k)
    inp, w, w2, b = (
        random_operand(R, C),
        random_operand(4 * C, C, 0.04, True),
        random_operand(C, 4 * C, 0.04, True),
        randn(4 * C),
    )
    out, dpre, slope = (
        operand(R, 4 * C, 32.0),
        operand(R, 4 * C, 32.0),
        torch.zeros(R, 4 * C, device="cuda", dtype=torch.uint8),
    )
    dbias, i16, wf, wp = (
        torch.empty(4 * C, device="cuda"),
        randn(R, C),
        randn(4 * C, C, std=0.04),
        randn(C, 4 * C, std=0.04),
    )
    pre16, out16 = randn(R, 4 * C), randn(R, 4 * C)
    calls = {
        "bf16": partial(K.matmul_gelu, out16, pre16, i16, wf, b),
        "fp8": partial(K.matmul_gelu, out, slope, inp, w, b),
    }
    compare(f"fc + GELU {R}x{4 * C}x{C}", calls | both("bare", inp.rows, w.rows), 8 * R * C * C)
    calls = {
        "bf16": partial(K.matmul_dx_dgelu, out16, dbias, None, scratch, i16, wp, pre16, False),
        "fp8": partial(K.matmul_dx_dgelu, dpre, dbias, None, scratch, inp, w2, slope, False),
    }
    compare(f"dX fcproj x gelu' {R}x{4 * C}x{C}", calls | both("bare", inp.rows, w2.columns), 8 * R * C * C)
    x, dout, lnw, lnb, mean, rstd = randn(R, C), randn(R, C), randn(C), randn(C), *torch.empty(2, R, device="cuda")
    ln8, dx8, sums = (
        operand(R, C, 16.0, False),
        operand(R, C, 16.0, False, randn(R, C)),
        torch.empty(3, C, device="cuda"),
    )
    ln16, dx16, norm = randn(R, C), randn(R, C), (x, lnw, lnb, mean, rstd, False)
    calls = {
        "bf16": partial(K.layernorm_fwd, ln16, mean, rstd, x, lnw, lnb),
        "fp8": partial(K.layernorm_fwd, ln8, mean, rstd, x, lnw, lnb),
        "copy of fp8's bytes": partial(ln16.view(-1)[: 3 * R * C // 4].copy_, x.view(-1)[: 3 * R * C // 4]),
    }
    compare(f"layernorm {R}x{C}", calls, nbytes=3 * R * C)
    calls = {
        "bf16": partial(K.layernorm_bwd, dx16, *sums, None, scratch, dout, *norm),
        "fp8": partial(K.layernorm_bwd, dx8, *sums, None, scratch, dout, *norm),
        "fp8, norm again": partial(K.layernorm_bwd, dx8, *sums, ln8, scratch, dout, *norm),
    }
    compare(f"layernorm_bwd {R}x{C}", calls, nbytes=9 * R * C)
    calls = {
        "fp8": partial(fp8.transpose, ln8.columns, ln8.rows, pairs=True),
        "copy": partial(ln8.columns.view(-1).copy_, ln8.rows.view(-1)),
    }
    compare(f"transpose {R}x{C}", calls, nbytes=2 * R * C)
    qkv, att, dqkv = randn(R, 3 * C), operand(R, C, 32.0, False, randn(R, C)), operand(R, 3 * C, 32.0, False)
    dqkv16, dbias = randn(R, 3 * C), torch.empty(3 * C, device="cuda")
    lse, delta = (torch.empty(d["B"], d["NH"], d["T"], device="cuda") for _ in range(2))
    calls = {"bf16": partial(K.attention_fwd, ln16, lse, qkv), "fp8": partial(K.attention_fwd, att, lse, qkv)}
    compare(f"attention_fwd {R}x{C}", calls)
    calls = {
        "bf16": partial(K.attention_bwd, dqkv16, dbias, delta, scratch, dout, qkv, ln16, lse, False),
        "fp8": partial(K.attention_bwd, dqkv, dbias, delta, scratch, dout, qkv, att, lse, False),
    }
    compare(f"attention_bwd {R}x{C}", calls)
    w8, w16 = random_operand(4 * C, C, 0.02, weight=True), randn(4 * C, C, std=0.02)
    compare(f"cast_operand {4 * C}x{C}", {"fp8": partial(K.cast_operand, w8, w16)}, nbytes=4 * 4 * C * C)


# ---- steps


def time_steps(size: str, level: str, precision: str) -> None:
    """Print the median of 24 steps, and the energy of one between changes of the counter."""
    import threading

    import torch

    import gpt2_triton.kernels as K
    from benchmarks.our_gpt2 import run_steps
    from benchmarks.sizes import SIZES, T, config_of, tokens_of
    from gpt2_triton.data.packing import pack_batch
    from gpt2_triton.model.arena import GIB
    from gpt2_triton.model.gpt2 import GPT2
    from gpt2_triton.training.lr_schedule import step_inputs

    batch = SIZES[size].batch
    config = config_of(size, batch, level).replace(train={"precision": precision})
    model = GPT2(config, K, "cuda")
    model.compile()
    model.initialise(config.train.seed)
    packed = pack_batch(None, *tokens_of(batch), config.model.vocab_size).pin_memory()
    if model.has_fp8:
        model.calibrate([packed], step_inputs(0, config, 1.0 / config.total_batch_tokens))
    list(run_steps(model, packed, range(6)))
    meter, done, found = Meter(), threading.Event(), list[tuple[float, float]]()
    sampler = threading.Thread(target=lambda: found.append(meter.watts(lambda: not done.is_set())))
    sampler.start()
    results = list(run_steps(model, packed, range(6, 30)))
    torch.cuda.synchronize()
    done.set()
    sampler.join()
    ms = statistics.median(result.seconds for result in results) * 1e3
    say(size=size, recompute=level, precision=precision, ms=ms, tok_s=round(batch * T / ms * 1e3),
        J=found[0][0] * ms / 1e3, GiB=model.plan.total / GIB, loss=results[-1].loss)  # fmt: skip


def run_part(part: str, *words: str) -> None:
    if part == "check":
        family, size = words
        CHECKS[family](*SHAPES.get(size, (512, 320)))
    elif part == "time":
        time_kernels(*SHAPES[words[0]])
    else:
        time_steps(*words)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in LIMIT:
        run_part(*sys.argv[1:])
    else:
        sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), sys.argv[2:] or list(LIMIT)))
