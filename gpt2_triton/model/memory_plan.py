"""Turns a configuration into sizes and a memory plan, and chooses the recompute level that fits.

The plan needs no GPU; only the functions about free or used bytes query a GPU.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape, step_conflicts
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.console import format_bytes
from gpt2_triton.data.packing import packed_size, scatter_bounds
from gpt2_triton.device import free_and_total_bytes
from gpt2_triton.errors import OutOfMemoryError
from gpt2_triton.model import architecture
from gpt2_triton.model.arena import GIB, PHASES, MemoryPlan, place_buffers, resolve_buffers
from gpt2_triton.model.decoding import Decoding
from gpt2_triton.model.fp8 import scale_count
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.muon import matrix_shapes
from gpt2_triton.model.optimizers import OPTIMIZERS, named
from gpt2_triton.model.recompute import layer_levels
from gpt2_triton.model.sharding import flat_buffer_sizes
from gpt2_triton.model.tables import (
    WINDOW,
    State,
    param_entries,
)
from gpt2_triton.model.tensor_stats import tracked_activations

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FIXED_DTYPES = dict(
    f32=torch.float32, i32=torch.int32, i16=torch.int16, u8=torch.uint8, e4m3=torch.float8_e4m3fn,
    e5m2=torch.float8_e5m2,
)  # fmt: skip
CONTEXT_BYTES = int(0.6 * GIB)  # of the CUDA context: 0.514 GiB (H200, driver 580), rounded up
# the kernels' code and the CUDA graphs, 0.16 GiB at 12 layers; on a CPU the interpreter's arrays
MODULE_BYTES = int(0.25 * GIB)
# computed at once for one text; with at most 16 rows, their number does not change a row's bits
LOGITS_ROWS = 16
Cure = tuple[str, Config, StepShape]  # what it is, and the step with it
# the level at which layers share all buffers that only a backward pass would read
FORWARD_ONLY = "block"


def forward_shape(batch: int) -> StepShape:
    """Return the shape of a model that only runs forward."""
    return StepShape(gpus=1, micro_batch=batch, accumulation=1, zero=0)


def dimensions(
    config: Config, K: Kernels, shape: StepShape, training: bool = True, sequences: int = 0
) -> dict[str, int]:
    """Return every symbol that tables.py uses, in numbers."""
    B, T = shape.micro_batch, config.train.seq_len
    d = dict(B=B, T=T, R=B * T, ranks=shape.gpus, zero=shape.zero) | architecture.dimensions(
        config.model
    )
    d["Tr"] = min(d["R"], d["Tmax"])
    head_rows = config.head_rows
    if config.train.precision != "bf16":
        head_rows = -(-head_rows // 16) * 16
    d["Rc"] = min(d["R"], head_rows)
    rows = config.model.head_row + d["V"]
    d["Ns"], d["Nh"], d["slots"] = scatter_bounds(d["R"], rows)
    d["Np"] = packed_size(d["R"], rows)
    d["Bd"] = sequences or int(training and config.sample.every > 0)
    d["Bl"] = d["Bd"] if training or not sequences else max(sequences, LOGITS_ROWS)
    d["Nw"] = WINDOW + 1 if training else 0
    master = config.optim.master == "fp32" and config.train.dtype == "bf16"
    d["optimizer"] = OPTIMIZERS.index(named(config.optim.name))
    d |= flat_buffer_sizes(d, training, master)
    params = architecture.of(config.model).Params
    layers = -(-d["L"] // d["ranks"])  # whose matrices a rank orthogonalises at once
    shapes = matrix_shapes(params, d)
    matrices = [(rows, columns, count * layers) for rows, columns, count in shapes]
    d["Nc"] = max((math.prod(shape) for shape in matrices), default=0)
    d["Q"] = scale_count(d["L"], config.train.precision, config.fp8.keep_bf16) if training else 0
    d["trains"] = int(training)
    d["bf16"] = int(d["Q"] == 0)
    d["fp8_head"] = int(d["Q"] > 0 and config.fp8.keep_bf16 == "none")
    d["bf16_head"] = 1 - d["fp8_head"]
    d["dropout"] = int(training and config.model.dropout > 0 and d["Q"] == 0)
    d["Sa"] = d["Sp"] = d["As"] = d["P"] = 0
    if training and config.log.stats_every:
        d["Sa"] = len(tracked_activations(d))
        d["Sp"] = len(list(param_entries(params, d)))
        d["P"] = K.stats_parts()
        d["As"] = d["Q"]
    d["W"] = K.scratch_elements(d, config.train.dtype, matrices)
    return d


def plan_memory(
    config: Config, K: Kernels, shape: StepShape, training: bool = True,
    dtypes: dict[str, torch.dtype] | None = None, sequences: int = 0,
) -> tuple[MemoryPlan, dict[str, int]]:  # fmt: skip
    """Return the plan and its dimensions; `sequences` are decoded at once, 0: for samples."""
    dims = dimensions(config, K, shape, training, sequences)
    dtypes = FIXED_DTYPES | (dtypes or dict(act=DTYPES[config.train.dtype]))
    for name in ("m", "v"):
        dtypes[name] = DTYPES["bf16"] if getattr(config.optim, name) == "bf16" else dtypes["f32"]
    levels = recompute_levels(config, training)
    A = architecture.of(config.model)
    buffers = [
        b
        for table in (State, A.Acts, *([A.Fp8Buffers] if dims["Q"] else []), Decoding)
        for b in resolve_buffers(table, dims, dtypes, levels)
    ]
    plan = place_buffers(buffers)
    if dims["Q"]:
        plan.between = _plan_between_steps(A.Acts, plan, dims, dtypes)
        plan.total = max(plan.total, plan.between.total)
    return plan, dims


def _plan_between_steps(
    table: type, plan: MemoryPlan, dims: dict[str, int], dtypes: dict[str, torch.dtype]
) -> MemoryPlan:
    """Return the plan of a bf16 forward pass between two fp8 steps, in free bytes."""
    forward = {"embed", "block", "head"}
    names = {f.name for table in (State, Decoding) for f in dataclasses.fields(table)}
    # the latter: rope
    fixed = {b.name: b for b in plan.buffers.values() if b.name in names or "between" in b.phases}
    levels = [FORWARD_ONLY] * dims["L"]
    dims = dims | dict(trains=0, bf16=1, bf16_head=1, fp8_head=0)
    acts = [b for b in resolve_buffers(table, dims, dtypes, levels) if b.spec.kind != "backward"]
    for b in acts:
        b.live = " ".join(phase for phase in PHASES if phase in b.phases & forward)
    return place_buffers([b for b in acts if b.live and b.name not in fixed], [*fixed.values()])


def bytes_by_kind(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of each kind of buffer, had each a place of its own."""
    out: dict[str, int] = {}
    for b in plan.buffers.values():
        out[b.spec.kind] = out.get(b.spec.kind, 0) + (0 if b.within else b.nbytes)
    return out


def recompute_levels(config: Config, training: bool) -> list[str]:
    level = config.memory.recompute if training else FORWARD_ONLY
    assert level != "auto", "choose_recompute comes first"
    return layer_levels(level, config.model.n_layer)


def _plan_bytes(config: Config, K: Kernels, shape: StepShape) -> int:
    plan, _ = plan_memory(config, K, shape)
    return plan.total


def largest_batch(total_bytes: Callable[[int], int], budget: int) -> int:
    """Return the largest B with total_bytes(B) of at most `budget`, or 0;
    total_bytes grows with B.
    """
    low = 0
    high = 1
    while total_bytes(high) <= budget:
        low = high
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if total_bytes(middle) <= budget:
            low = middle
        else:
            high = middle
    return low


def choose_recompute(config: Config, K: Kernels, budget: int, shape: StepShape) -> Config:
    """Replace memory.recompute `auto` by the fastest level that fits `budget`, in
    as few layers as it needs.
    """
    if config.memory.recompute != "auto":
        return config

    def fits(level: str) -> bool:
        return _plan_bytes(config.replace(memory={"recompute": level}), K, shape) <= budget

    level = next(filter(fits, RECOMPUTE_LEVELS), RECOMPUTE_LEVELS[-1])
    if level != RECOMPUTE_LEVELS[0]:
        # with the number of layers at `level`, the bytes stay equal or shrink
        some = range(1, config.model.n_layer)
        n = bisect.bisect_left(some, True, key=lambda n: fits(f"{level}:{n}"))
        level = f"{level}:{some[n]}" if n < len(some) else level
    return config.replace(memory={"recompute": level})


def free_bytes(device: str) -> int:
    """Return the bytes that a plan may use on this GPU, or for "cpu" on this machine."""
    return max(0, free_and_total_bytes(device)[0] - MODULE_BYTES)


def used_bytes(device: str) -> int:
    """Return the bytes in use on this GPU, CUDA's context and other processes' too; 0 on a CPU."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def memory_in_use_report(plan: MemoryPlan, before: int) -> str:
    """Return one line: the plan, and the bytes in use on this GPU now and `before` the run."""
    use = f"{format_bytes(used_bytes('cuda'))}, before the run {format_bytes(before)}"
    return f"memory: planned {format_bytes(plan.total)}; GPU in use {use}, by all processes"


class Forecast(NamedTuple):
    """What a training step needs, and what else would fit `budget` bytes."""

    config: Config  # with the recompute level that `auto` chooses
    shape: StepShape
    plan: MemoryPlan
    budget: int
    levels: dict[str, tuple[int, int]]  # recompute level: bytes, largest micro-batch that fits
    stages: dict[int, int]  # parallel.zero: bytes; empty on one GPU

    def usable_batch(self, level: str) -> int:
        """Return the largest micro-batch that fits at a level and divides a GPU's
        sequences of a step, or 0.
        """
        rows = self.shape.micro_batch * self.shape.accumulation
        most = min(self.levels[level][1], rows)
        return max((batch for batch in range(1, most + 1) if rows % batch == 0), default=0)

    @property
    def todo(self) -> str | None:
        """What makes a step of the same tokens fit: the first that does of nothing,
        recomputation, batch and stage; None if none does.
        """
        batch = self.usable_batch(self.config.memory.recompute)
        deepest = self.usable_batch(RECOMPUTE_LEVELS[-1])
        stage = next((stage for stage, nbytes in self.stages.items() if nbytes <= self.budget), 0)
        train = self.config.train
        tokens = ""
        if not train.total_batch_tokens:  # which a smaller batch would change
            tokens = f" and train.total_batch_tokens to {train.step_tokens}"
        choices = {
            "": self.plan.total <= self.budget,
            "set memory.recompute to auto": deepest >= self.shape.micro_batch,
            f"set train.batch_size to {batch}{tokens}": batch,
            f"set parallel.zero to {stage}": stage,
            f"set memory.recompute to auto, train.batch_size to {deepest}{tokens}": deepest,
        }
        return next((choice for choice, fits in choices.items() if fits), None)


def forecast(config: Config, K: Kernels, budget: int, shape: StepShape) -> Forecast:
    """Return the plans of a step, and which fit `budget` bytes; needs no GPU."""
    config = choose_recompute(config, K, budget, shape)
    plan, _ = plan_memory(config, K, shape)
    taken = config.memory.recompute
    at = RECOMPUTE_LEVELS.index(taken.partition(":")[0])
    # once each: a level of some layers comes before the level of all
    shown = dict.fromkeys((*RECOMPUTE_LEVELS[:at], taken, *RECOMPUTE_LEVELS[at:]))
    levels = {level: _at_level(level, config, K, budget, shape) for level in shown}
    stages = {
        z: _plan_bytes(config, K, dataclasses.replace(shape, zero=z))
        for z in (0, 1, 2)
        if shape.gpus > 1
    }
    return Forecast(config, shape, plan, budget, levels, stages)


def _at_level(
    level: str, config: Config, K: Kernels, budget: int, shape: StepShape
) -> tuple[int, int]:
    """Return the bytes of a recompute level's plan, and the largest micro-batch that fits."""
    config = config.replace(memory={"recompute": level})

    def total(B: int) -> int:
        return _plan_bytes(config, K, dataclasses.replace(shape, micro_batch=B))

    return total(shape.micro_batch), largest_batch(total, budget)


def advice(found: Forecast, K: Kernels) -> str:
    """Return what makes a step fit: `todo`; else, with a `todo` of its own, the first
    storage of the optimizer and the fewest GPUs that do.
    """
    if found.todo is not None:
        return found.todo
    kinds = (_storages(found.config, found.shape), _more_gpus(found.config, found.shape))
    cures = [next(_fitting(kind, K, found.budget), None) for kind in kinds]
    return ", or ".join(filter(None, cures)) or "take a smaller model: no batch fits"


def _fitting(cures: Iterator[Cure], K: Kernels, budget: int) -> Iterator[str]:
    """Yield the cures that fit, each with what else it needs."""
    for said, config, shape in cures:
        todo = forecast(config, K, budget, shape).todo
        if todo is not None:
            yield f"{said} and {todo}" if todo else said


def _storages(config: Config, shape: StepShape) -> Iterator[Cure]:
    """Yield smaller storages of weights and moments."""
    moments = dict(m="bf16", v="bf16")
    for storage in (dict(master="none"), moments, dict(master="none", **moments)):
        new = {key: to for key, to in storage.items() if getattr(config.optim, key) != to}
        said = ", ".join(f"optim.{key} to {to}" for key, to in new.items())
        if new:
            yield f"set {said}", config.replace(optim=new), shape


def _more_gpus(config: Config, shape: StepShape) -> Iterator[Cure]:
    """Yield as many or more GPUs of a host that divide a step, at ZeRO stage 2."""
    config = config.replace(parallel=dict(zero=2, gpus=None))
    for gpus in (2, 4, 8):
        divides = not any(step_conflicts(config.train, gpus))
        if divides and gpus >= shape.gpus:
            yield f"take {gpus} GPUs with parallel.zero 2", config, StepShape.of(config, gpus)


def require_memory(
    plan: MemoryPlan, config: Config, K: Kernels, shape: StepShape, device: str, training: bool
) -> None:
    """Raise OutOfMemoryError unless the plan fits the device; it names the free
    memory and what would fit.
    """
    budget = free_bytes(device)
    if plan.total <= budget:
        return
    free, total = free_and_total_bytes(device)
    owner = "GPU"
    rest = "kernels and graphs"
    if device == "cpu":
        owner = "machine"
        rest = "the interpreter"
    has = (
        f"{format_bytes(plan.total)} and {format_bytes(MODULE_BYTES)} for {rest}, "
        f"the {owner} has {format_bytes(free)} of {format_bytes(total)} free"
    )
    if not training:
        todo = "free some memory, choose a smaller model, or lower --batch of `sample`"
        raise OutOfMemoryError(f"the model needs {has}: {todo}")
    todo = advice(forecast(config, K, budget, shape), K)
    now = f"now batch {shape.micro_batch}, {config.memory.recompute}"
    raise OutOfMemoryError(f"the plan needs {has}; {todo} ({now}); --plan shows what fits")
