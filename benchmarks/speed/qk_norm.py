"""Times steps and operations of llama:c768 with and without QK-norm, in turns on one GPU.

    python -m benchmarks.speed.qk_norm

Power, and so speed, depends on the numbers that are multiplied.  The norm makes rows of q and k of
RMS 1, and initial weights make smaller ones.  So a third model without the norm has weights that
make q and k as large: the norm's own cost is what a step takes beside this one.

The record's section `qk_norm` has for bf16 and fp8 the milliseconds and joules of a step, and in it
the milliseconds of the operations that norm heads.  An H200 takes about 2 minutes.
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

TURNS = 8
UNCOUNTED, COUNTED = 8, 17  # steps of a turn
OPERATIONS = {"product_of_qkv": "matmul_rope", "attention_backward": "attention_bwd"}

app = make_app("python -m benchmarks.speed.qk_norm", "Steps of Llama with and without QK-norm.")


class Steps:
    """A model whose steps are timed in turns with others'."""

    def __init__(self, work: Work, *, like_normed: bool = False) -> None:
        """`like_normed`: initial weights make rows of q and k of RMS 1, as QK-norm does."""
        config = work.config()
        self.like_normed = like_normed
        self.packed = packed_batch(config)
        self.model = Model(config, K, "cuda")
        compile_run(self.model)

    def begin(self) -> None:
        """Give the model its initial weights again."""
        model = begun(self.model, self.packed)
        if self.like_normed:
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


def steps_in_turns(plain: Work, normed: Work) -> dict[str, float]:
    """Return the milliseconds and joules of a step: without the norm, without it where q and k are
    as large as with it, and with it.  Return also how much longer the last takes than either, with
    half the widths of their 95% intervals.
    """
    programs = dict(
        plain=Steps(plain), like_normed=Steps(plain, like_normed=True), normed=Steps(normed)
    )
    for program in programs.values():
        program.turn()  # captures the step
    turns = [{name: each.turn() for name, each in programs.items()} for _ in range(TURNS)]
    found: dict[str, float] = {}
    for name in programs:
        of_program = [turn[name] for turn in turns]
        found[f"{name}_ms"] = statistics.median(ms for ms, _ in of_program)
        joules = [joules for _, joules in of_program if joules is not None]
        if joules:
            found[f"{name}_joules"] = statistics.median(joules)
    for name in ("plain", "like_normed"):
        ratios = [turn["normed"][0] / turn[name][0] for turn in turns]
        found[f"longer_than_{name}"] = statistics.fmean(ratios) - 1
        half = student_t(TURNS - 1) * statistics.stdev(ratios) / math.sqrt(TURNS)
        found[f"half_width_{name}"] = half
    return found


def operations_ms(work: Work) -> dict[str, float]:
    """Return the milliseconds that a step spends in each of OPERATIONS."""
    gc.collect()  # frees the arenas of earlier works
    torch.cuda.empty_cache()  # a plan has to fit the memory that torch does not keep
    found, _ = ops.measure(work, COUNTED)
    return {
        key: sum(len(op.spans) * statistics.median(op.ms) for op in found if op.name == name)
        for key, name in OPERATIONS.items()
    }


@app.default
def measure(*, target: Target = CURRENT) -> None:
    """Measure steps in bf16 and in fp8, and write the record's section `qk_norm`."""
    figures: dict[str, Any] = {}
    for precision in ("bf16", "fp8"):
        plain = work_of("llama:c768", precision=precision)
        normed = work_of("llama:c768", precision=precision, keys=("--model.qk_norm", "true"))
        rows = {precision: steps_in_turns(plain, normed)}
        without = operations_ms(plain)
        for name, ms in operations_ms(normed).items():
            longer = ms / without[name] - 1
            rows[f"{precision}_{name}"] = dict(
                plain_ms=without[name], normed_ms=ms, longer_than_plain=longer
            )
        for row, columns in rows.items():
            print(row, *(f"{name} {value:.4g}" for name, value in columns.items()), flush=True)
            figures |= {f"{row}.{name}": float(f"{v:.5g}") for name, v in columns.items()}
        target.write("qk_norm", figures, "torch", "triton")


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
