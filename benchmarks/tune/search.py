"""Searches launch parameters for this GPU: `python -m benchmarks tune`.

A row of the table holds the launch parameters of one operation.  The search runs a step of
each size with one layer, and stops before each launch.  Candidates for the rows of this
launch are compiled on all cores, and their outputs are compared with the current row's
outputs.  Then all are timed as CUDA graphs, in rounds with a rotating order, because the
clock of a loaded GPU drifts by 5 to 8%.

All candidates are timed briefly first.  Since the best of forty short timings is partly luck, the
best few are then timed longer, beside the current row.  A candidate replaces the row if all
launches that use the row gain 2% together.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import gpt2_triton.kernels as kernels
from benchmarks.layout import aligned
from benchmarks.speed.sizes import MODELS, work_of
from benchmarks.tune import calls, tables
from benchmarks.tune.calls import Call, Trial, trying
from benchmarks.tune.candidates import SPACE, candidates
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import Progress, print_line
from gpt2_triton.device import memory_bytes
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import write_atomic
from gpt2_triton.kernels import table_file, tuning
from gpt2_triton.kernels.table_file import Key, Row
from gpt2_triton.model.memory_plan import CONTEXT_BYTES, MODULE_BYTES, plan_memory

GAIN = 1.02  # the least gain that replaces a row: twice the variation of a median over FINAL rounds
SCREEN, FINAL = 5, 25  # rounds
FINALISTS = 3  # candidates that are timed longer, beside the current row
# bound of ||difference|| / ||current|| over 256 numbers: an error of one bf16 unit in each number
# gives at most 2^-7, a missing tile or key at least 0.1
TOLERANCE = 2.0**-6
DTYPE = "bf16"
# sequences: a size that fits with fewer sequences is tuned only if --sizes names it
LEAST_BATCH = 4
# on Hopper, kernels/hopper runs these operations with constants, at every size that is tuned
HOPPER_OPS = {
    "matmul",
    "matmul_dw",
    "classifier_fwd",
    "attention_fwd",
    "attention_bwd_dq",
    "attention_bwd_dkdv",
}

# size: for each candidate, total ms of the launches that use the row
Times = dict[str, list[float | None]]


def select(only: str | None) -> list[str]:
    """Return the operations to tune on this GPU: all, or those that `only`
    names by name or first word.
    """
    ops = [op for op in SPACE if not (tuning.is_hopper() and op in HOPPER_OPS)]
    if only is None:
        return ops
    wanted = only.split(",")
    families = dict.fromkeys(op.split("_")[0] for op in SPACE)
    for word in wanted:
        if word not in SPACE and word not in families:
            raise ConfigError(f"--only: unknown {word}; known are {', '.join([*families, *SPACE])}")
    chosen = [op for op in ops if op in wanted or op.split("_")[0] in wanted]
    if not chosen:
        raise ConfigError(
            f"--only: {only} has no rows to tune on this GPU: "
            "kernels/hopper runs it, without a table"
        )
    return chosen


def gain(times: Times, i: int) -> float:
    """Return old time / new time, as a geometric mean over sizes; 0 if the candidate
    failed or loses 2% at any size.
    """
    ratios = []
    for column in times.values():
        old, new = column[0], column[i]
        if old is None or new is None or new > GAIN * old:
            return 0.0
        ratios.append(old / new)
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0


def finalists(rows: list[Row], times: Times) -> list[Row]:
    """Return the current row and at most FINALISTS candidates, the best that gain anything."""
    gains = {i: gain(times, i) for i in range(1, len(rows))}
    best = sorted((i for i in gains if gains[i] > 1.0), key=lambda i: -gains[i])
    return [rows[0], *(rows[i] for i in best[:FINALISTS])]


def winner(rows: list[Row], times: Times) -> int:
    """Return the index of the row to keep: 0, the current row, unless another gains GAIN."""
    best = max(range(len(rows)), key=lambda i: gain(times, i)) if times else 0
    return best if gain(times, best) >= GAIN else 0


def batches_of(sizes: list[str] | None, batch: int | None, budget: int) -> dict[str, int]:
    """Return the batch of each size to tune: `batch`, else the largest up to MODELS'
    batch that fits `budget` bytes.

    Without `sizes`, take each size that fits with LEAST_BATCH sequences, or d12 if none fits.
    """
    found = {
        size: _fitting_batch(size, batch or MODELS[size].batch, budget) for size in sizes or MODELS
    }
    if not sizes:
        large = {
            size: B for size, B in found.items() if B >= min(LEAST_BATCH, batch or LEAST_BATCH)
        }
        found = large or {"d12": found["d12"]}
    return {size: batch or B for size, B in found.items()}


def _fitting_batch(size: str, B: int, budget: int) -> int:
    config = work_of(size, B).config()
    fits = plan_memory(config, kernels, StepShape.of(config))[0].total <= budget
    return B if fits or B == 1 else _fitting_batch(size, B // 2, budget)


class Search:
    """One pass over the sizes.  It times all candidates for a row at
    each call that uses the row.
    """

    def __init__(self, rows: dict[Key, Row], tries: dict[str, list[Row]], rounds: int):
        self.rows = rows
        self.tries = tries
        self.rounds = rounds
        self.times: dict[str, Times] = {op: {} for op in tries}
        self.dropped: dict[tuple[str, int], str] = {}

    def run(
        self,
        sizes: Iterable[str],
        step: Callable[[str, Callable[[Call], None]], None],
        on_done: Callable[[str, str], None],
    ) -> "Search":
        """Run `step(size, on_call)` for each size; the step calls on_call(call) before each launch.

        Call on_done(size, op) after each measurement.
        """
        for size in sizes:

            def on_call(call: Call, size: str = size) -> None:
                for op in self.tries:
                    if (op, DTYPE) in call.used and len(self.tries[op]) > 1:
                        self._measure(size, op, call)
                        on_done(size, op)

            step(size, on_call)
        return self

    def _measure(self, size: str, op: str, call: Call) -> None:
        """Compile, compare and time the candidates of `op` at this call, and add
        the times to `self.times`.
        """
        key = (op, DTYPE)
        choices = {i: row for i, row in enumerate(self.tries[op]) if (op, i) not in self.dropped}
        with kernels.compiling(ignore_errors=True):
            for row in choices.values():
                with trying(self.rows, key, row), contextlib.suppress(*calls.REFUSED):
                    call()
        trial = Trial(call)
        launches = {}
        for i, row in choices.items():
            with trying(self.rows, key, row):
                reason = trial.fault(TOLERANCE)
                if reason:
                    self.dropped[op, i] = reason
        for i, row in choices.items():
            if (op, i) not in self.dropped:
                with trying(self.rows, key, row):
                    launches[i] = trial.graph()
        ms = calls.interleaved(launches, self.rounds)
        trial.restore()
        column = self.times[op].setdefault(size, [0.0] * len(self.tries[op]))
        for i, before in enumerate(column):
            column[i] = before + ms[i] if before is not None and i in ms else None


def tune(sizes: list[str] | None, batch: int | None, only: str | None, out: Path | None) -> int:
    """Search, print each row's old and new milliseconds, and write the table if a row
    gains or the GPU has no table.
    """
    ops = select(only)
    table = tuning.table()
    gpu = torch.cuda.get_device_name()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    amd = bool(torch.version.hip)
    shared = getattr(
        properties, "shared_memory_per_block" if amd else "shared_memory_per_block_optin"
    )
    tries = {op: candidates(op, table.rows[op, DTYPE], shared, caps=not amd) for op in ops}
    batches = batches_of(sizes, batch, memory_bytes(None) - CONTEXT_BYTES - MODULE_BYTES)
    target = out or table_file.given_file() or tables.file_of(table, table_file.table_name(), gpu)
    print_line(
        f"tuning for {gpu}, some minutes: "
        f"{', '.join(f'{size} B {B}' for size, B in batches.items())}"
    )
    began = time.monotonic()
    with calls.recorded_rows() as rows, Progress("tuning", None, "measurements") as progress:

        def step(size: str, on_call: Callable[[Call], None]) -> None:
            calls.intercepted_step(size, batches[size], rows, on_call)

        def on_done(size: str, op: str) -> None:
            progress.advance(1, f"{size} {op}")

        screened = Search(rows, tries, SCREEN).run(batches, step, on_done)
        tries = {op: finalists(tries[op], screened.times[op]) for op in ops}
        final = Search(rows, tries, FINAL)
        if any(len(rows) > 1 for rows in tries.values()):
            final.run(batches, step, on_done)
    print(f"\n{report(tries, final.times)}")
    for line in faults(screened, final):
        print(line)
    changes = {(op, DTYPE): tries[op][i] for op in ops if (i := winner(tries[op], final.times[op]))}
    if changes or not table.names(gpu):
        write_atomic(target, tables.text(tables.updated(table, gpu, changes)).encode())
        print(f"wrote {target}: {len(changes)} rows changed, in {time.monotonic() - began:.0f} s")
        print(f"to use it in any installation, set {table_file.VARIABLE}={target.absolute()}")
    else:
        print(f"no row gains {GAIN - 1:.0%}: nothing is written")
    return 0


def report(tries: dict[str, list[Row]], times: dict[str, Times]) -> str:
    """Return one line per row: old ms over all sizes, ms of the best candidate,
    gain, changed parameters.
    """
    lines = [["row", "old ms", "new ms", "gain", ""]]
    for op, rows in tries.items():
        best = max(range(1, len(rows)), key=lambda i: gain(times[op], i), default=0)
        if not best or not gain(times[op], best):
            lines.append([op, "-", "-", "-", "unchanged"])
            continue
        old, new = (sum(column[i] or 0.0 for column in times[op].values()) for i in (0, best))
        changed = ", ".join(
            f"{n} {rows[0].get(n, '-')} -> {v}"
            for n, v in rows[best].items()
            if rows[0].get(n) != v
        )
        verdict = changed if winner(rows, times[op]) else f"unchanged ({changed})"
        lines.append([op, f"{old:.3f}", f"{new:.3f}", f"{gain(times[op], best) - 1:+.1%}", verdict])
    return aligned(lines, left=(0, 4))


def faults(*searches: Search) -> list[str]:
    """Return a line that counts candidates which do not compile or fit, and a
    line per wrong candidate.
    """
    reasons = [
        (op, i, search.tries[op][i], r)
        for search in searches
        for (op, i), r in search.dropped.items()
    ]
    wrong = [f"WRONG: {op} {row}: {r}" for op, _, row, r in reasons if r.startswith(calls.DIFFERS)]
    unfit = len(reasons) - len(wrong)
    return ([f"{unfit} candidates need more than this GPU has"] if unfit else []) + wrong
