"""The text of `train --plan`."""

from typing import Any

from gpt2_triton.config.config import Config
from gpt2_triton.config.rules import vocabulary_note
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import format_bytes
from gpt2_triton.model.arena import MemoryPlan
from gpt2_triton.model.memory_plan import CONTEXT_BYTES, MODULE_BYTES, forecast


def plan_report(
    config: Config, K: Any, gpu_bytes: int, shape: StepShape, gpu: str = "a GPU", architecture: str | None = None
) -> str:
    """Return the text: buffers, memory by level and stage, whether the run fits; without `architecture` for a CPU."""
    config, notes = config.choose_precision(architecture)
    found = forecast(config, K, gpu_bytes - CONTEXT_BYTES - MODULE_BYTES, shape)
    plan, level = found.plan, found.config.memory.recompute
    rest = f", and {format_bytes(CONTEXT_BYTES + MODULE_BYTES)} for the CUDA context, kernels and graphs"
    gpus = f"{shape.gpus} GPUs, on each " if shape.gpus > 1 else ""
    largest, rows = found.levels[level][1], shape.micro_batch * shape.accumulation
    usable, machine = found.usable_batch(level), f"{gpu} of {format_bytes(gpu_bytes)}"
    fits = f"fits {machine}" if plan.total <= found.budget else f"does not fit {machine}; {found.todo}"
    of_step = f"; {usable:,} is the largest that divides a step" if usable < min(largest, rows) else ""
    lines = [*_buffers(plan), "", f"{'recompute':<16}{'memory':>12}{'largest train.batch_size':>28}"]
    for name, (nbytes, most) in found.levels.items():
        lines.append(f"{name:<16}{format_bytes(nbytes):>12}{most:>28,}{'  <-' if name == level else ''}")
    if found.stages:
        lines += ["", f"{'parallel.zero':<16}{'memory':>12}   on each of {shape.gpus} GPUs"]
    for stage, nbytes in found.stages.items():
        lines.append(f"{stage:<16}{format_bytes(nbytes):>12}{'  <-' if stage == shape.zero else ''}")
    lines += [
        "",
        f"memory {format_bytes(plan.total)}{rest if architecture else ''}: {fits}",
        f"tokens of a step {config.train.step_tokens:,}: {gpus}{shape.accumulation} x "
        f"{shape.micro_batch} sequences of {config.train.seq_len:,}"
        + (f"; half as many in the first {config.train.ramp:,} steps" if config.train.ramp else ""),
        *([f"largest train.batch_size that fits {largest:,}{of_step}"] if architecture else []),
        f"parameters {config.n_params:,}",
        *notes,
        *vocabulary_note(config),
    ]
    return "\n".join(lines)


def _buffers(plan: MemoryPlan) -> list[str]:
    """Return a line for each buffer, bytes by class, and the total."""
    lines = ["buffers: letters of shapes as in gpt2_triton/model/tables.py; live: phases that use the buffer"]
    lines += [f"{'buffer':<12}{'shape':<16}{'copies':>7}{'dtype':>15}  {'live':<24}{'MiB':>11}{'offset':>16}"]
    for b in plan.buffers.values():
        dtype, size = str(b.dtype).removeprefix("torch."), b.nbytes / 2**20
        note = f"in {b.spec.within}" if b.spec.within else f"{size:,.1f}"
        lines.append(f"{b.name:<12}{b.spec.shape:<16}{b.copies:>7}{dtype:>15}  {b.live:<24}{note:>11}{b.offset:>16,}")
    lines += ["", f"{'class':<16}{'MiB':>11}"]
    lines += [f"{kind:<16}{nbytes / 2**20:>11,.1f}" for kind, nbytes in plan.by_kind().items()]
    shared = sum(plan.by_kind().values()) - plan.total
    return [*lines, f"arena {format_bytes(plan.total)} ({format_bytes(shared)} saved by sharing)"]
