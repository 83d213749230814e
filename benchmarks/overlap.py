"""Where the communication of a training step lies: a trace of some steps of a run on several GPUs, and its summary.

torchrun --standalone --nproc_per_node 4 -m benchmarks.overlap CONFIG OUT.json [--section.key value ...]

Rank 0 writes the trace for chrome://tracing or https://ui.perfetto.dev, and prints for each collective of a step its
time and how much of that no other kernel ran beside it: only this exposed part makes a step longer.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from gpt2_triton.cli import choose_device
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.configfile import load_config
from gpt2_triton.ranks import rank_and_size, read_environment

FIRST, STEPS = 6, 3  # of the run; graphs are captured in the first two


def exposed(spans: list[tuple[float, float]], busy: list[tuple[float, float]]) -> float:
    """The length of `spans` that lies in no span of `busy`; both are sorted (start, end), busy does not overlap."""
    total = 0.0
    for start, end in spans:
        covered = sum(max(0.0, min(end, e) - max(start, s)) for s, e in busy)
        total += end - start - covered
    return total


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that overlap joined into one, sorted."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def summary(trace: dict[str, Any], steps: int) -> str:
    """A line a collective: times a step, milliseconds a step, those of them exposed."""
    kernels = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    spans = [(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e["name"]) for e in kernels]
    compute = union([(start, end) for start, end, name in spans if "nccl" not in name.lower()])
    collectives = defaultdict(list)
    for start, end, name in spans:
        if "nccl" in name.lower():
            collectives[name.split("(")[0]].append((start, end))
    lines = [f"{'collective':<56}{'a step':>8}{'ms':>9}{'exposed ms':>12}"]
    for name, found in sorted(collectives.items()):
        time = sum(end - start for start, end in found) / steps
        bare = exposed(found, compute) / steps
        lines.append(f"{name[:55]:<56}{len(found) / steps:>8.0f}{time:>9.3f}{bare:>12.3f}")
    whole = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    busy = sum(end - start for start, end in compute) / steps
    lines.append(f"a step takes {whole / steps:.3f} ms, of which kernels that compute {busy:.3f} ms")
    return "\n".join(lines)


def main(config: str, out: str, *overrides: str) -> None:
    read_environment()
    rank, ranks = rank_and_size()
    settings = load_config(Path(config), parse_overrides(overrides)).with_gpus(ranks)
    choose_device()
    from gpt2_triton.trainer import Trainer, train

    original, profiler = Trainer._train_step, profile(activities=[ProfilerActivity.CUDA])

    def traced(self: Trainer, step: int) -> None:
        if rank == 0 and step in (FIRST, FIRST + STEPS):
            self._report_step()
            profiler.start() if step == FIRST else profiler.stop()
        original(self, step)

    Trainer._train_step = traced  # type: ignore[method-assign]
    train(settings, Path(out).with_suffix(".run"), False)
    if rank == 0:
        profiler.export_chrome_trace(out)
        print(summary(json.loads(Path(out).read_text()), STEPS))


if __name__ == "__main__":
    main(*sys.argv[1:])
