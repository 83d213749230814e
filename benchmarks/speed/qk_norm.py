"""Times steps of llama:c768 with and without QK-norm and a cap of its logits, in turns on one GPU.

    python -m benchmarks.speed.qk_norm

Power, and so speed, depends on the numbers that are multiplied.  The norm makes rows of q and k of
RMS 1, and initial weights make smaller ones.  So one model without the norm has weights that make
q and k as large: the norm's own price is what a step takes beside this one's.

The record's section `qk_norm` has a row for each model in bf16 and in fp8: milliseconds and joules
of a step, and the milliseconds of the operations that norm or cap.  An H200 takes two minutes.
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
from benchmarks.speed.energy import Power
from benchmarks.speed.our_gpt2 import begun, packed_batch, run_steps
from benchmarks.speed.sizes import Work, work_of
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.model.compiling import compile_run
from gpt2_triton.model.fp8 import calibrate
from gpt2_triton.model.init_weights import INIT_STD
from gpt2_triton.model.model import Model
from gpt2_triton.model.tables import param_views
from gpt2_triton.training.lr_schedule import step_inputs

TURNS = 6
UNCOUNTED, COUNTED = 5, 10  # steps of a turn
OPERATIONS = ("matmul_rope", "attention_bwd", "classifier_fwd")
NORM = ("--model.qk_norm", "true")
KEYS = {"plain": (), "qk_norm": NORM, "qk_norm_and_cap": (*NORM, "--model.logit_cap", "15")}

app = make_app("python -m benchmarks.speed.qk_norm", "Prices of QK-norm and of a cap of logits.")


class Steps:
    """A model whose steps are timed in turns with others'."""

    def __init__(self, work: Work, *, larger_q_and_k: bool = False) -> None:
        """`larger_q_and_k`: initial weights make rows of q and k of RMS 1, as QK-norm does."""
        config = work.config()
        self.larger_q_and_k = larger_q_and_k
        self.packed = packed_batch(config)
        self.model = Model(config, K, "cuda")
        compile_run(self.model)

    def begin(self) -> None:
        """Give the model its initial weights again."""
        model = begun(self.model, self.packed)
        if self.larger_q_and_k:
            enlarge_queries_and_keys(model)
            if model.has_fp8:
                calibrate(model, [self.packed], step_inputs(0, model.config))

    def turn(self) -> tuple[float, float | None]:
        """Return the median milliseconds of a step in one turn, and its joules."""
        self.begin()
        list(run_steps(self.model, self.packed, range(UNCOUNTED)))
        with Power() as power:
            steps = range(UNCOUNTED, UNCOUNTED + COUNTED)
            results = list(run_steps(self.model, self.packed, steps))
        seconds = statistics.median(result.seconds for result in results)
        return 1e3 * seconds, power.joules(seconds)


def enlarge_queries_and_keys(model: Model) -> None:
    """Multiply initial weights of q and k so that rows of an input of RMS 1 have RMS 1."""
    dims = model.dims
    rows = dims["Cq"] + dims["Ckv"]
    for weight in param_views(model.A.Params, model.state.params, dims).qkvw:
        weight[:rows].mul_(1 / (INIT_STD * math.sqrt(dims["C"])))


def in_turns(programs: dict[str, Steps]) -> dict[str, dict[str, float]]:
    """Return for each program the milliseconds and joules of a step, and how much longer it is than
    the step of the program before and than the first's, with half the widths of 95% intervals.
    """
    for program in programs.values():
        program.turn()  # captures the step
    turns = [{name: each.turn() for name, each in programs.items()} for _ in range(TURNS)]
    rows: dict[str, dict[str, float]] = {}
    names = list(programs)
    for i, name in enumerate(names):
        of_program = [turn[name] for turn in turns]
        row = {"ms": statistics.median(ms for ms, _ in of_program)}
        joules = [joules for _, joules in of_program if joules is not None]
        if joules:
            row["joules"] = statistics.median(joules)
        if i > 0:
            for key, other in (("longer", names[i - 1]), ("than_first", names[0])):
                ratios = [turn[name][0] / turn[other][0] - 1 for turn in turns]
                half = student_t(TURNS - 1) * statistics.stdev(ratios) / math.sqrt(TURNS)
                row |= {key: statistics.fmean(ratios), f"{key}_half_width": half}
        rows[name] = row
    return rows


def operations_ms(work: Work) -> dict[str, float]:
    """Return the milliseconds that a step spends in each of OPERATIONS."""
    gc.collect()  # frees the arenas of earlier works
    torch.cuda.empty_cache()  # a plan has to fit the memory that torch does not keep
    found, _ = ops.measure(work, COUNTED)
    return {
        name: sum(len(op.spans) * statistics.median(op.ms) for op in found if op.name == name)
        for name in OPERATIONS
    }


@app.default
def measure(*, target: Target = CURRENT) -> None:
    """Measure steps in bf16 and in fp8, and write the record's section `qk_norm`."""
    figures: dict[str, Any] = {}
    for precision in ("bf16", "fp8"):
        works = {
            name: work_of("llama:c768", precision=precision, keys=keys)
            for name, keys in KEYS.items()
        }
        programs = dict(
            plain=Steps(works["plain"]),
            larger_q_and_k=Steps(works["plain"], larger_q_and_k=True),
            qk_norm=Steps(works["qk_norm"]),
            qk_norm_and_cap=Steps(works["qk_norm_and_cap"]),
        )
        rows = in_turns(programs)
        del programs
        for name, work in works.items():
            rows[name] |= operations_ms(work)
        for name, columns in rows.items():
            print(
                precision,
                name,
                *(f"{key} {value:.4g}" for key, value in columns.items()),
                flush=True,
            )
            figures |= {f"{precision}_{name}.{key}": round(v, 5) for key, v in columns.items()}
        target.write("qk_norm", figures, "torch", "triton")


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
