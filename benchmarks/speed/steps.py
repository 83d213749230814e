"""Times training steps of GPT-2 and Llama 3, ours and PyTorch's, on the same GPU:
`python -m benchmarks steps`.

Each run is a process of its own, as a user's run is.  A step is forward, backward, clipping and the
update; all steps take the same random tokens.  A step's time runs from the end of the previous step
to its own end, and the host does not wait in between.  Figures are medians of the steps after the
fifth.  Joules come from the GPU's energy counter.
Our memory is the decrease of free device memory, so it includes kernels and graphs.
PyTorch's memory is the peak of its tensors, without the allocator's reserve.
Neither includes the CUDA context.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import as_gpu
from benchmarks.as_gpu import Code
from benchmarks.layout import aligned
from benchmarks.speed.sizes import Work, work_of
from gpt2_triton import device


class Program(NamedTuple):
    """A module that times steps in a process, with its arguments after SIZE BATCH STEPS
    START, and what starts it.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    recompute: str | None = None
    launcher: tuple[str, ...] = ()


PYTORCH = Program("PyTorch", "benchmarks.speed.torch_gpt2")
CHUNKED = Program("PyTorch chunks", PYTORCH.module, ("--chunks", "8"))
TORCH_MUON = Program("PyTorch muon", PYTORCH.module, ("--optim", "muon"))
TORCHAO = [Program(f"torchao {r}", PYTORCH.module, ("--fp8", r)) for r in ("tensorwise", "rowwise")]
BASELINES = dict(none=[], torch=[PYTORCH], chunks=[PYTORCH, CHUNKED])
BASELINES |= dict(muon=[PYTORCH, TORCH_MUON], torchao=[PYTORCH, *TORCHAO])


def ours(work: Work, code: Code | None = None) -> Program:
    """Return the program of this package's steps; with `code` in the kernels of another GPU."""
    words = ["--recompute", work.recompute, "--precision", work.precision, "--optim", work.optim]
    name = f"ours {work.precision}" + ("" if work.optim == "adamw" else f" {work.optim}")
    name += f", {as_gpu.title(code)}" if code else ""
    return Program(
        name,
        "benchmarks.speed.our_gpt2",
        (*words, *work.keys),
        work.recompute,
        as_gpu.program(code),
    )


def torchrun(gpus: int) -> tuple[str, ...]:
    """Return the words between `python -m` and a module that run it on GPUs of this machine."""
    return "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", "-m"


def within(seconds: float | None) -> list[str]:
    """Return the words before a module that run it and ask it to end at the limit; a
    killed torchrun leaves ranks.
    """
    return [
        "timeout",
        "--foreground",
        "--kill-after=60",
        f"{seconds or 0:.0f}",
        sys.executable,
        "-m",
    ]


def compare(
    works: list[Work], steps: int, baseline: str, out: Path | None, code: Code | None = None
) -> int:
    """Run, print the table, and write the figures as JSON.  Return 1 if a run
    fails; its cells stay empty.
    """
    rows: list[dict[str, Any]] = []
    for (size, batch), group in itertools.groupby(works, key=lambda work: (work.size, work.batch)):
        for program in (*(ours(work, code) for work in group), *BASELINES[baseline]):
            found: dict[str, Any] | None = None
            with suppress(subprocess.CalledProcessError):  # its stderr is printed
                found = run_program(program, size, batch, steps)
            rows.append(
                dict(
                    size=size,
                    batch=batch,
                    program=program.name,
                    recompute=program.recompute,
                    report=found,
                )
            )
            if out:
                out.write_text(
                    json.dumps(dict(gpu=device.name(), steps=steps, rows=rows), indent=1) + "\n"
                )
    print(f"\n{device.name()}\n{table(rows, device.peak_flops())}")
    return int(any(row["report"] is None for row in rows))


def run_program(
    program: Program,
    size: str,
    batch: int,
    steps: int,
    limit: float | None = None,
    env: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Run the program, with more variables in its environment, and return its report.

    If it fails, print its stderr and raise CalledProcessError.  Raise
    TimeoutExpired after `limit` seconds.
    """
    name = f"{program.name} {size} B {batch}"
    start = time.time()
    words = [
        *program.launcher,
        program.module,
        size,
        str(batch),
        str(steps),
        str(start),
        *program.arguments,
    ]
    command = [*within(limit), *words]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})
    if limit and run.returncode == 124:
        raise subprocess.TimeoutExpired(command, limit)
    if run.returncode:
        print(
            f"{name}: failed with code {run.returncode}, {time.time() - start:.0f} s in all",
            flush=True,
        )
        print(run.stderr, file=sys.stderr, flush=True)
        raise subprocess.CalledProcessError(run.returncode, command)
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    print(f"{name}: {report['ms']:.1f} ms per step, {time.time() - start:.0f} s in all", flush=True)
    return report


HEAD = [*"size B program recompute ms tok/s MFU J GiB planned".split(), "first step s"]
HEAD += ["speed", "memory"]


def table(rows: list[dict[str, Any]], peak: float | None) -> str:
    """Return one line per run: J per step, MFU at bf16's peak, speed and memory
    relative to PyTorch in bf16.
    """
    torchs = {row["size"]: row["report"] for row in rows if row["program"] == PYTORCH.name}
    return aligned([HEAD, *(cells(row, torchs.get(row["size"]), peak) for row in rows)])


def cells(row: dict[str, Any], torch: dict[str, Any] | None, peak: float | None) -> list[str]:
    """Return the line of a run beside PyTorch's report; - is not known."""
    found = row["report"]
    line = [row["size"], str(row["batch"]), row["program"], row["recompute"] or "-"]
    if not found:
        return line + ["-"] * (len(HEAD) - len(line))
    config = work_of(row["size"], row["batch"], row["recompute"]).config()
    rate = config.train.step_tokens / found["ms"] * 1e3
    mfu = f"{rate * config.flops_per_token / peak:.1%}" if peak else "-"
    joules = "-" if found.get("joules") is None else f"{found['joules']:.1f}"
    planned = f"{found['planned']:.2f}" if "planned" in found else "-"
    line += [f"{found['ms']:.1f}", f"{rate:,.0f}", mfu, joules, f"{found['gib']:.2f}", planned]
    line.append(f"{found['first_step']:.1f}")
    if torch is None:
        return [*line, "-", "-"]
    speed = torch["ms"] / found["ms"]
    return [*line, f"{speed:.3f}x", f"{found['gib'] / torch['gib']:.2f}x"]
