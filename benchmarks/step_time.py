"""Times training steps of GPT-2's four sizes, ours and PyTorch's, on the same GPU: `python -m benchmarks steps`.

Each run is a separate process, so that start-up and memory are those of a user's run.  A step is forward, backward,
clip and AdamW on the same random tokens.  Times are from the end of one step to the end of the next, without a
synchronisation in between: medians of the steps after the fifth.  Our memory is the decrease of free device memory,
kernels and graphs included.  PyTorch's is the peak of its tensors, without what its allocator reserves beyond that.
Neither includes the CUDA context.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sizes import SIZES, T, config_of
from gpt2_triton.device import peak_flops

Report = dict[str, Any]


def compare_sizes(
    sizes: list[str], batch: int | None, steps: int, recompute: str | None, baseline: bool, out: Path | None
) -> int:
    """Run, print the table, and write the figures as JSON.  Return 1 if a run failed; its cells are empty."""
    rows: list[Report] = []
    for size in sizes:
        B = batch or SIZES[size].batch
        level = recompute or SIZES[size].recompute
        rows.append(dict(size=size, batch=B, recompute=level))
        rows[-1]["ours"] = _run("ours", "benchmarks.our_gpt2", size, B, steps, level)
        rows[-1]["torch"] = _run("PyTorch", "benchmarks.torch_gpt2", size, B, steps) if baseline else None
        if out:
            out.write_text(json.dumps(dict(steps=steps, rows=rows), indent=1) + "\n")
    print("\n" + table(rows, peak_flops()))
    wanted = ("ours", "torch") if baseline else ("ours",)
    return int(any(row[who] is None for row in rows for who in wanted))


def _run(who: str, module: str, size: str, batch: int, steps: int, *more: str) -> Report | None:
    """Run the module in a process and return its report; if it fails, print its stderr and return None."""
    print(f"{who} {size} B {batch}: ", end="", flush=True)
    start = time.time()
    command = [sys.executable, "-m", module, size, str(batch), str(steps), str(start), *more]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        print(f"failed with code {run.returncode}, {time.time() - start:.0f} s in all", flush=True)
        print(run.stderr, file=sys.stderr, flush=True)
        return None
    report = json.loads(run.stdout.splitlines()[-1])
    print(f"{report['ms']:.1f} ms per step, {time.time() - start:.0f} s in all", flush=True)
    return report


OURS = ["ms", "tok/s", "MFU", "GiB", "planned", "first step s"]
TORCH = ["torch ms", "tok/s", "GiB", "first step s"]


def table(rows: list[Report], peak: float | None) -> str:
    """Return one line per size.  speed is PyTorch's time over ours, memory our GiB over PyTorch's."""
    lines = [["size", "B", "recompute", *OURS, *TORCH, "speed", "memory"]]
    for row in rows:
        ours, other, tokens = row["ours"], row["torch"], row["batch"] * T
        line = [row["size"], str(row["batch"]), row["recompute"]]
        if ours:
            rate = tokens / ours["ms"] * 1e3
            flops = config_of(row["size"], row["batch"], row["recompute"]).flops_per_token
            line += [f"{ours['ms']:.1f}", f"{rate:,.0f}", f"{rate * flops / peak:.1%}" if peak else "-"]
            line += [f"{ours['gib']:.2f}", f"{ours['planned']:.2f}", f"{ours['first_step']:.1f}"]
        else:
            line += ["-"] * len(OURS)
        if other:
            line += [f"{other['ms']:.1f}", f"{tokens / other['ms'] * 1e3:,.0f}"]
            line += [f"{other['gib']:.2f}", f"{other['first_step']:.1f}"]
        else:
            line += ["-"] * len(TORCH)
        both = ours and other
        line += [f"{other['ms'] / ours['ms']:.3f}x", f"{ours['gib'] / other['gib']:.2f}x"] if both else ["-", "-"]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)
