"""Times steps and operations of llama:c768 with and without QK-norm, in turns on one GPU.

    python -m benchmarks.speed.qk_norm

The record's section `qk_norm` has for bf16 and fp8 the milliseconds of a step, and in them those
of the operations that norm heads.  An H200 takes about 90 s.
"""

import gc
import math
import statistics
import sys
from typing import Any

import torch

import gpt2_triton.kernels as K
from benchmarks.losses.pairs import student_t
from benchmarks.record import CURRENT, Target
from benchmarks.speed import ops
from benchmarks.speed.our_gpt2 import begun, packed_batch, run_steps
from benchmarks.speed.sizes import Work, work_of
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.model.compiling import compile_run
from gpt2_triton.model.model import Model

TURNS, STEPS = 8, 20  # and steps of a turn, the first of which are not counted
UNCOUNTED = 5
OPERATIONS = {"product_of_qkv": "matmul_rope", "attention_backward": "attention_bwd"}

app = make_app("python -m benchmarks.speed.qk_norm", "Steps of Llama with and without QK-norm.")


class Steps:
    """A model whose steps are timed in turns with another's."""

    def __init__(self, work: Work) -> None:
        config = work.config()
        self.packed = packed_batch(config)
        self.model = Model(config, K, "cuda")
        compile_run(self.model)
        begun(self.model, self.packed)

    def ms(self) -> float:
        """Return the median milliseconds of a step in one turn."""
        results = [*run_steps(self.model, self.packed, range(STEPS))]
        return 1e3 * statistics.median(result.seconds for result in results[UNCOUNTED:])


def steps_in_turns(works: list[Work]) -> dict[str, float]:
    """Return the milliseconds of both works, and how much longer the second takes, with half the
    width of its 95% interval.
    """
    programs = [Steps(work) for work in works]
    for program in programs:
        program.ms()  # captures the step
    turns = [[program.ms() for program in programs] for _ in range(TURNS)]
    ms, normed = map(statistics.median, zip(*turns))
    ratios = [normed / ms for ms, normed in turns]
    half = student_t(TURNS - 1) * statistics.stdev(ratios) / math.sqrt(TURNS)
    longer = statistics.fmean(ratios) - 1
    return dict(ms=ms, normed_ms=normed, longer=longer, half_width=half)


def operations_ms(work: Work) -> dict[str, float]:
    """Return the milliseconds that a step spends in each of OPERATIONS."""
    gc.collect()  # frees the arenas of earlier works
    torch.cuda.empty_cache()  # a plan has to fit the memory that torch does not keep
    found, _ = ops.measure(work, STEPS)
    return {
        key: sum(len(op.spans) * statistics.median(op.ms) for op in found if op.name == name)
        for key, name in OPERATIONS.items()
    }


@app.default
def measure(*, target: Target = CURRENT) -> None:
    """Measure steps in bf16 and in fp8, and write the record's section `qk_norm`."""
    figures: dict[str, Any] = {}
    for precision in ("bf16", "fp8"):
        works = [
            work_of("llama:c768", precision=precision, keys=keys)
            for keys in ((), ("--model.qk_norm", "true"))
        ]
        rows = {precision: steps_in_turns(works)}
        plain, normed = map(operations_ms, works)
        for name, ms in plain.items():
            longer = normed[name] / ms - 1
            rows[f"{precision}_{name}"] = dict(ms=ms, normed_ms=normed[name], longer=longer)
        for row, columns in rows.items():
            print(row, *(f"{name} {value:.4g}" for name, value in columns.items()), flush=True)
            figures |= {f"{row}.{name}": float(f"{v:.5g}") for name, v in columns.items()}
        target.write("qk_norm", figures, "torch", "triton")


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
