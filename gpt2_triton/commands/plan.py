"""The text of `train --plan`."""

from typing import NamedTuple

from gpt2_triton.config.config import Config
from gpt2_triton.config.precision import choose_precision
from gpt2_triton.config.speed import figures_of, training_hours
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import duration, format_bytes, format_count
from gpt2_triton.model.arena import MemoryPlan
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.memory_plan import (
    CONTEXT_BYTES,
    MODULE_BYTES,
    Forecast,
    advice,
    bytes_by_kind,
    forecast,
)
from gpt2_triton.model.rates import rates_line
from gpt2_triton.model.recompute import meaning

MOST_BATCH = 1024  # sequences: a GPU is busy with fewer


class Gpu(NamedTuple):
    """The GPU, or CPU, of a plan."""

    name: str  # in the verdict
    nbytes: int
    architecture: str | None = None  # None: a CPU
    key: str | None = None  # of device.GPUS


class Report(NamedTuple):
    """The text of a plan in parts."""

    fits: bool
    verdict: list[str]  # whether the run fits; tokens, time, batches
    also: list[str]  # what the log of a run says too: rates, precision, vocabulary
    choices: list[str]  # memory by recompute level and ZeRO stage; none for a CPU
    buffers: list[str]

    def text(self, buffers: bool) -> str:
        """Return the verdict first, and the buffers if they are asked for."""
        end = ["", *self.buffers] if buffers else ["", "--buffers also prints each buffer"]
        return "\n".join([*self.verdict, *self.also, *self.choices, *end])


def plan_report(config: Config, K: Kernels, gpu: Gpu, shape: StepShape) -> Report:
    """Return the plan of a run on GPUs of one kind."""
    config, notes = choose_precision(config, gpu.architecture)
    found = forecast(config, K, gpu.nbytes - CONTEXT_BYTES - MODULE_BYTES, shape)
    fits = found.plan.total <= found.budget
    rest = (
        f", and {format_bytes(CONTEXT_BYTES + MODULE_BYTES)} for the "
        "CUDA context, kernels and graphs"
    )
    machine = f"{gpu.name} of {format_bytes(gpu.nbytes)}"
    verdict = [
        f"fits {machine}" if fits else f"does not fit {machine}; {advice(found, K)}",
        f"memory {format_bytes(found.plan.total)}{rest if gpu.architecture else ''}",
        *_work(config, shape),
        *_time(config, gpu, shape),
        *(_largest_batch(found) if gpu.architecture else []),
    ]
    also = [rates_line(config), *notes]
    choices = _choices(found) if gpu.architecture else []
    return Report(fits, verdict, also, choices, _buffers(found.plan))


def _work(config: Config, shape: StepShape) -> list[str]:
    """Return a line about the tokens of a step and of the run."""
    train = config.train
    gpus = f"{shape.gpus} GPUs, on each " if shape.gpus > 1 else ""
    rows = f"{gpus}{shape.accumulation} x {shape.micro_batch} sequences of {train.seq_len:,}"
    total = format_count(train.steps * train.step_tokens)
    return [f"tokens {total}: {train.steps:,} steps of {train.step_tokens:,}, {rows}"]


def _time(config: Config, gpu: Gpu, shape: StepShape) -> list[str]:
    """Return a line about the time of all steps on a GPU; it is known if the model was measured."""
    if gpu.architecture is None:  # commands/own.py has a CPU's
        return []
    hours = training_hours(config, figures_of(gpu.key or ""))
    if hours is None:
        return ["time unknown: not measured for this model on this GPU; a run prints it as eta"]
    gpus = f", an {gpu.key}'s divided by {shape.gpus}" if shape.gpus > 1 else ""
    about = duration(3600 * hours / shape.gpus)
    return [f"time about {about} by measured speed{gpus}, without validations"]


def _largest_batch(found: Forecast) -> list[str]:
    level = found.config.memory.recompute
    shape = found.shape
    largest = found.levels[level][1]
    if largest > MOST_BATCH:
        return []
    usable = found.usable_batch(level)
    limit = min(largest, shape.micro_batch * shape.accumulation)
    of_step = f"; {usable:,} is the largest that divides a step" if usable < limit else ""
    return [f"largest train.batch_size that fits {largest:,}{of_step}"]


def _batch(size: int) -> str:
    return f"{size:,}" if size <= MOST_BATCH else f"over {MOST_BATCH:,}"


def _choices(found: Forecast) -> list[str]:
    """Return the memory by recompute level and, on several GPUs, ZeRO stage, and mark the run's."""
    lines = ["", f"{'recompute':<16}{'memory':>12}{'largest train.batch_size':>28}"]
    for level, (nbytes, most) in found.levels.items():
        arrow = f"  <- {meaning(level)}" if level == found.config.memory.recompute else ""
        lines.append(f"{level:<16}{format_bytes(nbytes):>12}{_batch(most):>28}{arrow}")
    if found.stages:
        lines += ["", f"{'parallel.zero':<16}{'memory':>12}   on each of {found.shape.gpus} GPUs"]
    for stage, nbytes in found.stages.items():
        arrow = "  <-" if stage == found.shape.zero else ""
        lines.append(f"{stage:<16}{format_bytes(nbytes):>12}{arrow}")
    return lines


def _buffers(plan: MemoryPlan) -> list[str]:
    """Return a line for each buffer, bytes by class, and the total."""
    letters = "letters of shapes as in gpt2_triton/model/tables.py"
    head = f"{'buffer':<12}{'shape':<16}{'copies':>7}{'dtype':>15}  "
    head += f"{'live':<24}{'MiB':>11}{'offset':>16}"
    lines = [f"buffers: {letters}; live: phases that use the buffer", head]
    for b in plan.buffers.values():
        dtype = str(b.dtype).removeprefix("torch.")
        size = b.nbytes / 2**20
        note = f"in {b.within}" if b.within else f"{size:,.1f}"
        lines.append(
            f"{b.name:<12}{b.spec.shape:<16}{b.copies:>7}{dtype:>15}  "
            f"{b.live:<24}{note:>11}{b.offset:>16,}"
        )
    lines += ["", f"{'class':<16}{'MiB':>11}"]
    lines += [f"{kind:<16}{nbytes / 2**20:>11,.1f}" for kind, nbytes in bytes_by_kind(plan).items()]
    shared = sum(bytes_by_kind(plan).values()) - plan.total
    return [*lines, f"arena {format_bytes(plan.total)} ({format_bytes(shared)} saved by sharing)"]
