"""Steps of GPT-2's four sizes, ours and PyTorch's, in turn on the same GPU: `python -m gpt2_triton bench`.

Each run is a process of its own, so that start-up and memory are those of a user's run.  A step is forward, backward,
clip and AdamW on random tokens; times are medians of the steps after the fifth.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sizes import SIZES, T, config_of
from gpt2_triton.config import ConfigError
from gpt2_triton.gpus import flops_per_token, peak_flops

Report = dict[str, Any]


def bench(
    sizes: list[str], batch: int | None, steps: int, recompute: str | None, baseline: bool, out: Path | None
) -> None:
    """Run, print the table, and write it as JSON."""
    rows = []
    for size in sizes:
        B = batch or SIZES[size].batch
        level = recompute or SIZES[size].recompute
        ours = _run("ours", "benchmarks.our_gpt2", size, B, steps, level)
        rows.append(dict(size=size, batch=B, recompute=level, ours=ours, torch=None))
        if baseline:
            rows[-1]["torch"] = _run("PyTorch", "benchmarks.torch_gpt2", size, B, steps)
    print("\n" + table(rows, peak_flops()))
    if out:
        out.write_text(json.dumps(dict(steps=steps, rows=rows), indent=1) + "\n")


def _run(who: str, module: str, size: str, batch: int, steps: int, *more: str) -> Report:
    print(f"{who} {size} B {batch}: ", end="", flush=True)
    start = time.time()
    command = [sys.executable, "-m", module, size, str(batch), str(steps), str(start), *more]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        why = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"bench: {who} {size} at batch {batch} ended with code {run.returncode}: {why}")
    report = json.loads(run.stdout.splitlines()[-1])
    print(f"{report['ms']:.1f} ms a step, {time.time() - start:.0f} s in all", flush=True)
    return report


def table(rows: list[Report], peak: float | None) -> str:
    """One line a size; ratios above 1 are in our favour."""
    head = ["size", "B", "recompute", "ms", "tok/s", "MFU", "GiB", "first step s"]
    head += ["torch ms", "tok/s", "GiB", "first step s", "speed", "memory"]
    lines = [head]
    for row in rows:
        ours, other, tokens = row["ours"], row["torch"], row["batch"] * T
        rate = tokens / ours["ms"] * 1e3
        flops = flops_per_token(config_of(row["size"], row["batch"], "gelu"))
        line = [row["size"], str(row["batch"]), row["recompute"], f"{ours['ms']:.1f}", f"{rate:,.0f}"]
        line += [f"{rate * flops / peak:.1%}" if peak else "-", f"{ours['gib']:.2f}", f"{ours['first_step']:.1f}"]
        if other:
            line += [f"{other['ms']:.1f}", f"{tokens / other['ms'] * 1e3:,.0f}", f"{other['gib']:.2f}"]
            line += [
                f"{other['first_step']:.1f}",
                f"{other['ms'] / ours['ms']:.3f}x",
                f"{ours['gib'] / other['gib']:.2f}x",
            ]
        lines.append(line + [""] * (len(head) - len(line)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
