"""Memory plan of a run: sizes from the configuration, the plan, its report, and the recompute level that fits.

The plan needs no GPU; only the functions about free or used bytes query one.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.config.values import RECOMPUTE_LEVELS, SIZES
from gpt2_triton.console import format_bytes
from gpt2_triton.data.packing import packed_size, scatter_bounds
from gpt2_triton.device import free_and_total_bytes
from gpt2_triton.errors import OutOfMemoryError
from gpt2_triton.model.arena import GIB, PHASES, MemoryPlan, place_buffers, resolve_buffers
from gpt2_triton.model.buffers import WINDOW, Acts, Decoding, State, layer_levels, param_entries, tracked_activations
from gpt2_triton.model.fp8 import Fp8Buffers, scales
from gpt2_triton.model.sharding import flat_buffer_sizes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FIXED_DTYPES = dict(
    f32=torch.float32, i32=torch.int32, i16=torch.int16, u8=torch.uint8, e4m3=torch.float8_e4m3fn
)  # fmt: skip
CONTEXT_BYTES = int(0.6 * GIB)  # 0.514 GiB on an H200 with driver 580, rounded up
# the kernels' code and the CUDA graphs, 0.16 GiB at 12 layers; on a CPU the interpreter's arrays
MODULE_BYTES = int(0.25 * GIB)
LOGITS_ROWS = 16  # of a text, at once: the most that a decode step takes whose results do not depend on their number
FORWARD_ONLY = "block"  # the level at which layers share all buffers that only a backward pass would read


def model_dimensions(m: ModelConfig) -> dict[str, int]:
    """Return the symbols of buffers.py that the shapes of parameters use, in numbers."""
    L = m.n_layer
    return dict(C=m.n_embd, L=L, S=2 * L + 1, V=m.vocab_size, Vp=m.padded_vocab, Tmax=m.block_size)


def dimensions(
    config: Config, K: Any, B: int, T: int, training: bool = True, sequences: int = 0, shape: StepShape | None = None
) -> dict[str, int]:
    """Return every symbol that buffers.py uses, in numbers."""
    d = dict(B=B, T=T, R=B * T, NH=config.model.n_head) | model_dimensions(config.model)
    d["Rc"] = min(d["R"], config.head_rows)
    d["Ns"], d["Nh"], d["slots"] = scatter_bounds(d["R"], d["V"])
    d["Np"] = packed_size(d["R"], d["V"])
    d["N"] = sum(math.prod(e.shape) for e in param_entries(d))
    d["Bd"] = sequences or int(training and config.sample.every > 0)
    d["Rp"] = d["Rc"] if training else 0
    d["Bl"] = d["Bd"] if training or not sequences else max(sequences, LOGITS_ROWS)
    d["Nw"] = WINDOW + 1 if training else 0
    master = config.optim.master == "fp32" and config.train.dtype == "bf16"
    d["ranks"], d["zero"] = 1, 0
    if training:
        shape = shape or StepShape.of(config)
        d["ranks"], d["zero"] = shape.gpus, shape.zero
    d |= flat_buffer_sizes(d, training, master, config.optim.name == "muon")
    d["A"] = len(scales(config.fp8_operations)) if training else 0
    d["Sa"] = d["Sp"] = d["As"] = d["P"] = 0
    if training and config.log.stats_every:
        d["Sa"], d["Sp"], d["P"] = len(tracked_activations(d)), len(list(param_entries(d))), K.stats_parts()
        d["As"] = d["A"]
    d["W"] = K.scratch_elements(d, config.train.dtype)
    return d


def plan_memory(
    config: Config, K: Any, B: int, T: int, training: bool = True, dtypes: dict[str, torch.dtype] | None = None,
    sequences: int = 0, shape: StepShape | None = None,
) -> tuple[MemoryPlan, dict[str, int]]:  # fmt: skip
    """Return the exact memory plan of a run with micro-batch B, and its dimensions.

    sequences   how many are decoded at once; 0: one if this is a training run that prints samples, else none
    shape       of a training step, by default StepShape.of(config)
    """
    dims = dimensions(config, K, B, T, training, sequences, shape)
    dtypes = FIXED_DTYPES | (dtypes or dict(act=DTYPES[config.train.dtype]))
    dtypes["v"] = dtypes["f32"] if config.optim.v == "fp32" else DTYPES[config.optim.v]
    levels, fp8 = recompute_levels(config, training), config.fp8_operations if training else ()
    buffers = [
        b
        for table in (State, Acts, *([Fp8Buffers] if any(fp8) else []), Decoding)
        for b in resolve_buffers(table, dims, dtypes, levels, RECOMPUTE_LEVELS, fp8)
    ]
    plan = place_buffers(buffers)
    if any(fp8):
        plan.between = _plan_between_steps(plan, dims, dtypes)
        plan.total = max(plan.total, plan.between.total)
    return plan, dims


def _plan_between_steps(plan: MemoryPlan, dims: dict[str, int], dtypes: dict[str, torch.dtype]) -> MemoryPlan:
    """Return the plan of a forward pass in bf16 between two steps of an fp8 run.  It has the plan's other buffers, and
    the activations of a model that only runs forward in bytes that no buffer holds between steps.
    """
    forward, names = {"embed", "block", "head"}, {f.name for table in (State, Decoding) for f in fields(table)}
    levels, dims = [FORWARD_ONLY] * dims["L"], dims | dict(Rp=0)
    acts = [b for b in resolve_buffers(Acts, dims, dtypes, levels, RECOMPUTE_LEVELS) if b.spec.kind != "backward"]
    for b in acts:
        b.live = " ".join(phase for phase in PHASES if phase in b.phases & forward)
    return place_buffers([b for b in acts if b.live], [b for b in plan.buffers.values() if b.name in names])


def recompute_levels(config: Config, training: bool) -> list[str]:
    """Return the recompute level of each layer."""
    level = config.memory.recompute if training else FORWARD_ONLY
    assert level != "auto", "choose_recompute comes first"
    return layer_levels(level, config.model.n_layer)


def _plan_bytes(config: Config, K: Any, shape: StepShape, B: int | None = None) -> int:
    """Return the bytes of the plan with micro-batch B, by default that of the shape."""
    return plan_memory(config, K, B or shape.micro_batch, config.train.seq_len, shape=shape)[0].total


def _largest_batch(config: Config, K: Any, shape: StepShape, budget: int) -> int:
    """Return the largest micro-batch whose plan fits `budget` bytes, 0 if none does."""
    return largest_batch(lambda B: _plan_bytes(config, K, shape, B), budget)


def largest_batch(total_bytes: Callable[[int], int], budget: int) -> int:
    """Return the largest batch whose plan fits `budget` bytes, 0 if none does; total_bytes(B) grows with B."""
    low, high = 0, 1
    while total_bytes(high) <= budget:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total_bytes(middle) <= budget else (low, middle)
    return low


def choose_recompute(config: Config, K: Any, budget: int, shape: StepShape | None = None) -> Config:
    """Return the configuration with memory.recompute `auto` replaced by the first level, which is the fastest, whose
    plan fits `budget` bytes, in as few layers as necessary; by the last level if none fits.
    """
    if config.memory.recompute != "auto":
        return config
    step = shape or StepShape.of(config)

    def fits(level: str) -> bool:
        return _plan_bytes(config.replace(memory={"recompute": level}), K, step) <= budget

    level = next(filter(fits, RECOMPUTE_LEVELS), RECOMPUTE_LEVELS[-1])
    if level != RECOMPUTE_LEVELS[0]:
        some = range(1, config.model.n_layer)  # the bytes do not grow with the layers
        n = bisect.bisect_left(some, True, key=lambda n: fits(f"{level}:{n}"))
        level = f"{level}:{some[n]}" if n < len(some) else level
    return config.replace(memory={"recompute": level})


def free_bytes(device: str) -> int:
    """Return the bytes that a plan may use on this GPU, or for "cpu" on this machine."""
    return max(0, free_and_total_bytes(device)[0] - MODULE_BYTES)


def used_bytes(device: str) -> int:
    """Return the bytes in use on this GPU, 0 on a CPU.  The first call creates the CUDA context and so returns its
    size and what other processes use.
    """
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def memory_in_use_report(plan: MemoryPlan, before: int) -> str:
    """Return one line that compares the plan with the memory in use on this GPU; `before` bytes were in use before the
    run.
    """
    use = f"planned {format_bytes(plan.total)}, in use {format_bytes(used_bytes('cuda') - before)}"
    return f"memory: {use}, before the run {format_bytes(before)} (CUDA context, other processes)"


def plan_report(config: Config, K: Any, gpu_bytes: int, shape: StepShape, gpu: str = "a GPU") -> str:
    """Return as text whether the run fits a GPU of this size, which the text calls `gpu`, its step, the bytes of each
    recompute level with the largest micro-batch that fits, and the plan; needs no GPU.
    """
    budget = gpu_bytes - CONTEXT_BYTES - MODULE_BYTES
    chosen = choose_recompute(config, K, budget, shape)
    plan, dims = plan_memory(chosen, K, shape.micro_batch, config.train.seq_len, shape=shape)
    fits = "fits" if plan.total <= budget else "does not fit"
    rest = f"and {format_bytes(CONTEXT_BYTES + MODULE_BYTES)} for the CUDA context, kernels and graphs"
    at_levels = _at_levels(chosen, K, shape, budget)
    gpus = f"{shape.gpus} GPUs, on each " if shape.gpus > 1 else ""
    largest, rows = at_levels[chosen.memory.recompute][1], shape.micro_batch * shape.accumulation
    usable = next((batch for batch in range(min(largest, rows), 0, -1) if rows % batch == 0), 0)
    of_step = f"; {usable:,} of those that divide a step" if usable < min(largest, rows) else ""
    return "\n".join(
        [
            f"memory {format_bytes(plan.total)}, {rest}: {fits} {gpu} of {format_bytes(gpu_bytes)}",
            f"tokens of a step {config.total_batch_tokens:,}: {gpus}{shape.accumulation} x "
            f"{shape.micro_batch} sequences of {config.train.seq_len:,}",
            f"largest train.batch_size that fits {largest:,}{of_step}",
            f"parameters {dims['N']:,}",
            "",
            *_recompute_table(chosen, at_levels),
            *_zero_table(chosen, K, shape),
            "",
            "buffers: shapes in the letters of gpt2_triton/model/buffers.py, live in the phases of a step",
            format_plan(plan),
        ]
    )


def format_plan(plan: MemoryPlan) -> str:
    """Return the plan as text: one line per buffer, bytes by class, the total."""
    lines = [f"{'buffer':<12}{'shape':<16}{'copies':>7}{'dtype':>15}  {'live':<24}{'MiB':>11}{'offset':>16}"]
    for b in plan.buffers.values():
        dtype, size = str(b.dtype).removeprefix("torch."), b.nbytes / 2**20
        note = f"in {b.spec.within}" if b.spec.within else f"{size:,.1f}"
        lines.append(f"{b.name:<12}{b.spec.shape:<16}{b.copies:>7}{dtype:>15}  {b.live:<24}{note:>11}{b.offset:>16,}")
    lines += ["", f"{'class':<16}{'MiB':>11}"]
    lines += [f"{kind:<16}{nbytes / 2**20:>11,.1f}" for kind, nbytes in plan.by_kind().items()]
    shared = sum(plan.by_kind().values()) - plan.total
    lines.append(f"arena {format_bytes(plan.total)} ({format_bytes(shared)} saved by sharing)")
    return "\n".join(lines)


def _at_levels(config: Config, K: Any, shape: StepShape, budget: int) -> dict[str, tuple[int, int]]:
    """Return (bytes, largest micro-batch that fits) by recompute level, that of the configuration among them."""
    taken, found = config.memory.recompute, {}
    at = RECOMPUTE_LEVELS.index(taken.partition(":")[0])
    for level in (*RECOMPUTE_LEVELS[:at], taken, *RECOMPUTE_LEVELS[at:]):
        at_level = config.replace(memory={"recompute": level})
        if level not in found:
            found[level] = _plan_bytes(at_level, K, shape), _largest_batch(at_level, K, shape, budget)
    return found


def _recompute_table(config: Config, at_levels: dict[str, tuple[int, int]]) -> list[str]:
    lines = [f"{'recompute':<16}{'memory':>12}{'largest train.batch_size':>28}"]
    for level, (nbytes, largest) in at_levels.items():
        mark = "  <-" if level == config.memory.recompute else ""
        lines.append(f"{level:<16}{format_bytes(nbytes):>12}{largest:>28,}{mark}")
    return lines


def _zero_table(config: Config, K: Any, shape: StepShape) -> list[str]:
    if shape.gpus == 1:
        return []
    lines = ["", f"{'parallel.zero':<16}{'memory':>12}   on each of {shape.gpus} GPUs"]
    for stage in (0, 1, 2):
        total = _plan_bytes(config, K, dataclasses.replace(shape, zero=stage))
        lines.append(f"{stage:<16}{format_bytes(total):>12}{'  <-' if stage == shape.zero else ''}")
    return lines


def require_fits(
    plan: MemoryPlan, config: Config, K: Any, shape: StepShape, device: str, training: bool = True, sequences: int = 0
) -> None:
    """Raise OutOfMemoryError, with what would fit, if the plan exceeds `free_bytes`."""
    if plan.total > free_bytes(device):
        raise out_of_memory(plan, config, K, shape, device, training, sequences)


def out_of_memory(
    plan: MemoryPlan, config: Config, K: Any, shape: StepShape, device: str, training: bool, sequences: int
) -> OutOfMemoryError:
    """Return the error for a plan that the device has no room for: what it has, and what would fit."""
    free, (unused, total) = free_bytes(device), free_and_total_bytes(device)
    owner, rest = ("machine", "the interpreter") if device == "cpu" else ("GPU", "kernels and graphs")
    has = (
        f"{format_bytes(plan.total)} and {format_bytes(MODULE_BYTES)} for {rest}, the {owner} has "
        f"{format_bytes(unused)} of {format_bytes(total)} free"
    )
    if training:
        now = f"now batch {shape.micro_batch}, {config.memory.recompute}"
        return OutOfMemoryError(
            f"the plan needs {has}: {_that_fits(config, K, shape, free)} ({now}); --plan shows the buffers"
        )

    def forward_bytes(decoded: int) -> int:
        return plan_memory(config, K, shape.micro_batch, config.train.seq_len, False, sequences=decoded)[0].total

    if sequences > 1 and (most := largest_batch(forward_bytes, free)):
        return OutOfMemoryError(f"to decode {sequences} texts at once takes {has}: set --batch to {most}")
    return OutOfMemoryError(f"the model needs {has}: free some memory, or use a machine with more")


def _that_fits(config: Config, K: Any, shape: StepShape, free: int) -> str:
    """Return the changes of a training run that would fit: another batch, a deeper recompute level, a smaller model."""
    rows = config.total_batch_tokens // config.train.seq_len // shape.gpus  # of a step: a multiple of the batch

    def batch(level: str) -> int:
        most = _largest_batch(config.replace(memory={"recompute": level}), K, shape, free)
        return max((B for B in range(1, min(most, rows) + 1) if rows % B == 0), default=0)

    step = f"train.total_batch_tokens to {config.total_batch_tokens}"
    if best := batch(config.memory.recompute):
        return f"set train.batch_size to {best} and {step}, or a deeper memory.recompute"
    deepest = RECOMPUTE_LEVELS[-1]
    if best := batch(deepest):
        return f"set memory.recompute to {deepest}, train.batch_size to {best} and {step}"
    sizes = {name: SIZES[name] for name in SIZES if name.startswith("d")}
    for name, (layers, width, heads, _) in reversed(sizes.items()):
        model = dict(n_layer=layers, n_embd=width, n_head=heads)
        smaller = config.replace(model=model, memory={"recompute": deepest})
        if smaller.n_params < config.n_params and _plan_bytes(smaller, K, shape, 1) <= free:
            return (
                f"take a smaller model: model.size {name} with memory.recompute {deepest} and train.batch_size 1 fits"
            )
    return "take a smaller model (model.n_layer, model.n_embd, train.seq_len), or a machine with more memory"
