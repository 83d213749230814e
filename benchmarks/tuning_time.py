"""The measurements of a search and an estimate of their time, from a rehearsal of its steps (rehearsal.py)."""

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import gpt2_triton.kernels as kernels
from benchmarks import calls, floors, ops
from benchmarks.rehearsal import Kernel, calls_of, recorded_kernels
from benchmarks.sizes import SIZES, config_of
from gpt2_triton.kernels.table_file import Key, Row
from gpt2_triton.model.memory_plan import plan_memory

LEAST_BATCH = 4  # sequences: a size that trains with fewer is not tuned for, unless it is named
COMPILE = 2.0  # seconds of a core for a kernel: the mean of 64 candidates for sm_89 on a slow shared core (triton 3.9)
SLOWER = 2.0  # a candidate takes this times the floor of its call, assumed
COMPARED = 60  # bytes moved to compare a number of an output, in fp32, by a dozen operations of torch
HOST = 0.02  # seconds of the host per candidate: saving, capturing a graph, reading the difference; assumed
SIZE = 10.0  # seconds to build a model, compile its kernels and run two steps; assumed


class Speed(NamedTuple):
    """A machine: its GPU's flop/s in bf16 and bytes per second, and its cores."""

    flops: float
    bandwidth: float
    cores: int


class Work(NamedTuple):
    """The measurement of all candidates of an operation's row at one call."""

    size: str
    call: str  # Call.key
    op: str
    candidates: int
    kernels: int  # to compile: those that no earlier measurement needs
    flops: int
    nbytes: int
    numbers: int  # of the outputs

    def seconds(self, candidates: int, rounds: int, speed: Speed) -> float:
        """Return the estimated time to compare and time so many candidates, compiled before."""
        floor = max(self.flops / speed.flops, self.nbytes / speed.bandwidth)
        timed = (rounds + 1) * max(calls.SAMPLE_MS / 1e3, SLOWER * floor)
        return candidates * (HOST + self.numbers * COMPARED / speed.bandwidth + timed)


def seconds_of(
    work: list[Work], speed: Speed, screen: int, final: int, finalists: int
) -> dict[tuple[str, str, str, str], float]:
    """Return the estimated seconds of each measurement, by pass, size, call and operation, in rounds of the passes."""
    seconds = {}
    started: set[str] = set()
    for w in work:
        once = 0.0 if w.size in started else SIZE
        started.add(w.size)
        compiling = w.kernels * COMPILE / speed.cores
        seconds["screening", w.size, w.call, w.op] = once + compiling + w.seconds(w.candidates, screen, speed)
        seconds["finals", w.size, w.call, w.op] = once + w.seconds(min(finalists, w.candidates), final, speed)
    return seconds


def speed_of_this_machine() -> Speed:
    """Measure a large product of cuBLAS and a copy on this GPU, in a second."""
    side = 8192
    flops = 2 * side**3 / floors.product_ms("forward", side, side, side) * 1e3
    return Speed(flops, floors.copy_bandwidth(), len(os.sched_getaffinity(0)))


def batches_of(sizes: list[str] | None, batch: int | None, budget: int) -> dict[str, int]:
    """Return the batch of each size to tune: `batch`, else as large as a run of the size fits `budget` bytes, at most
    the benchmarks' own.  Without `sizes`, those whose runs fit with LEAST_BATCH sequences; d12 if none does.
    """
    found = {size: _fitting_batch(size, batch or SIZES[size].batch, budget) for size in sizes or SIZES}
    if not sizes:
        large = {size: B for size, B in found.items() if B >= min(LEAST_BATCH, batch or LEAST_BATCH)}
        found = large or {"d12": found["d12"]}
    return {size: batch or B for size, B in found.items()}


def _fitting_batch(size: str, B: int, budget: int) -> int:
    while B > 1 and plan_memory(config_of(size, B, SIZES[size].recompute), kernels, B, calls.T)[0].total > budget:
        B //= 2
    return B


def work_of(batches: Mapping[str, int], tries: Mapping[str, list[Row]], rows: calls.Rows, dtype: str) -> list[Work]:
    """Return the measurements of a search in their order; `rows` are those that launchers take."""
    compiled: set[Kernel] = set()
    work = []
    for size, B in batches.items():
        for call in calls_of(config_of(size, B, SIZES[size].recompute, n_layer=1), rows):
            for op in (op for op in tries if (op, dtype) in call.used):
                found = set(_kernels(call, (op, dtype), tries[op], rows))
                work.append(_work(size, call, op, len(tries[op]), len(found - compiled)))
                compiled |= found
    return work


def _kernels(call: calls.Call, key: Key, choices: list[Row], rows: calls.Rows) -> Iterator[Kernel]:
    for row in choices:
        with calls.trying(rows, key, row), recorded_kernels() as found, contextlib.suppress(*calls.REFUSED):
            call()
        yield from found


def _work(size: str, call: calls.Call, op: str, candidates: int, kernels: int) -> Work:
    name = call.launcher.__name__
    arguments = inspect.signature(call.launcher).bind(*call.args, **call.keywords).arguments
    numbers = sum(out.numel() for out in call.args[: call.launcher.outputs] if out is not None)
    moved = ops.moved_bytes(name, arguments)
    return Work(size, call.key, op, candidates, kernels, ops.flops(name, arguments), moved, numbers)
