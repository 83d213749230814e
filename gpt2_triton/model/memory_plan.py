"""What a run needs of a GPU's memory: sizes from the configuration, the plan, its report, and the recompute level that
fits.  Nothing here touches a GPU, but for asking how much of it is free.
"""

import math
import os
import sys
from typing import Any

import torch

from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import RECOMPUTE_LEVELS, ModelConfig
from gpt2_triton.data.packing import packed_size, scatter_bounds
from gpt2_triton.errors import OutOfMemoryError
from gpt2_triton.model.arena import GIB, Plan, largest_batch, plan, resolve
from gpt2_triton.model.buffers import WINDOW, Acts, Decoding, State, layer_levels, param_entries
from gpt2_triton.model.sharding import flat_buffer_sizes
from gpt2_triton.model.tensor_stats import slots

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CONTEXT_BYTES = int(0.6 * GIB)  # 0.514 GiB on an H200 with driver 580, rounded up
MODULE_BYTES = int(0.25 * GIB)  # the kernels' code and the CUDA graphs: 0.16 GiB at 12 layers


def model_dimensions(m: ModelConfig) -> dict[str, int]:
    """The symbols of tables.py that the parameters' shapes use, in numbers."""
    return dict(
        C=m.n_embd, L=m.n_layer, S=2 * m.n_layer + 1, V=m.vocab_size, Vp=m.padded_vocab, Tmax=m.block_size
    )  # fmt: skip


def dimensions(config: Config, K: Any, B: int, T: int, training: bool = True, texts: int = 0) -> dict[str, int]:
    """Every symbol that tables.py uses, in numbers."""
    d = dict(B=B, T=T, R=B * T, NH=config.model.n_head) | model_dimensions(config.model)
    d["Rc"] = min(d["R"], config.head_rows)
    d["Ns"], d["Nh"], d["slots"] = scatter_bounds(d["R"], d["V"])
    d["Np"] = packed_size(d["R"], d["V"])
    d["N"] = sum(math.prod(e.shape) for e in param_entries(d))
    d["Bd"] = texts or int(training and config.sample.every > 0)
    d["Nw"] = WINDOW + 1 if training else 0
    master = config.optim.master == "fp32" and config.train.dtype == "bf16"
    d["ranks"], d["zero"] = (config.gpus, config.zero) if training else (1, 0)
    d |= flat_buffer_sizes(d, training, master)
    watched = training and config.log.stats_every > 0
    d["Sa"], d["Sp"], d["P"] = (len(slots(d)), len(list(param_entries(d))), K.stats_parts()) if watched else (0, 0, 0)
    d["W"] = K.scratch_elements(d, config.train.dtype)
    return d


def plan_memory(
    config: Config, K: Any, B: int, T: int, training: bool = True, dtypes: dict[str, torch.dtype] | None = None,
    texts: int = 0,
) -> tuple[Plan, dict[str, int]]:  # fmt: skip
    """The exact memory plan of a run with micro-batch B, and the dimensions it was made from; `texts` are decoded at
    once, one in a training run that prints samples.
    """
    dims = dimensions(config, K, B, T, training, texts)
    dtypes = dtypes or dict(act=DTYPES[config.train.dtype], f32=torch.float32, i32=torch.int32, i16=torch.int16)
    level = config.memory.recompute if training else "block"
    assert level != "auto", "choose_recompute comes first"
    levels = layer_levels(level, dims["L"])
    rows = [row for table in (State, Acts, Decoding) for row in resolve(table, dims, dtypes, levels, RECOMPUTE_LEVELS)]
    return plan(rows), dims


def choose_recompute(config: Config, K: Any, budget: int) -> Config:
    """The configuration with memory.recompute `auto` replaced by the first level whose plan fits `budget` bytes, the
    fastest, in as few layers as need be; by the last level if none fits.
    """
    if config.memory.recompute != "auto":
        return config

    def fits(level: str) -> bool:
        choice = config.replace(memory={"recompute": level})
        return plan_memory(choice, K, choice.micro_batch, choice.train.seq_len)[0].total <= budget

    level = next(filter(fits, RECOMPUTE_LEVELS), RECOMPUTE_LEVELS[-1])
    if level != RECOMPUTE_LEVELS[0]:
        level = next(filter(fits, (f"{level}:{n}" for n in range(1, config.model.n_layer))), level)
    return config.replace(memory={"recompute": level})


def free_bytes(device: str) -> int:
    """Bytes that a plan may have on this GPU; no bound on a CPU."""
    return sys.maxsize if device == "cpu" else torch.cuda.mem_get_info()[0] - MODULE_BYTES


def used_bytes(device: str) -> int:
    """Bytes in use on this GPU, 0 on a CPU; the first call creates the CUDA context and so returns its size."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def memory_in_use_report(made: Plan, before: int) -> str:
    """The plan beside what is in use on this GPU, of which `before` bytes were before the run."""
    use = f"planned {made.total / GIB:.3f} GiB, in use {(used_bytes('cuda') - before) / GIB:.3f} GiB"
    return f"memory: {use}, before the run {before / GIB:.3f} GiB (CUDA context, other processes)"


def _total_and_largest(config: Config, K: Any, budget: int) -> tuple[int, int]:
    """Bytes of the plan, and the largest micro-batch whose plan fits the budget."""

    def total_bytes(B: int) -> int:
        return plan_memory(config, K, B, config.train.seq_len)[0].total

    return total_bytes(config.micro_batch), largest_batch(total_bytes, budget)


def plan_report(config: Config, K: Any, gpu_bytes: int) -> str:
    """The plan as text, what each recompute level needs and the largest micro-batch it lets fit a GPU of this size;
    needs no GPU.
    """
    T, budget = config.train.seq_len, gpu_bytes - CONTEXT_BYTES - MODULE_BYTES
    chosen = choose_recompute(config, K, budget)
    made, dims = plan_memory(chosen, K, config.micro_batch, T)
    lines = [f"{'recompute':<16}{'GiB':>8}{'largest train.batch_size':>28}"]
    taken = chosen.memory.recompute
    at = RECOMPUTE_LEVELS.index(taken.partition(":")[0])
    for level in dict.fromkeys((*RECOMPUTE_LEVELS[:at], taken, *RECOMPUTE_LEVELS[at:])):
        total, best = _total_and_largest(config.replace(memory={"recompute": level}), K, budget)
        mark = "  <-" if level == taken else ""
        lines.append(f"{level:<16}{total / GIB:>8.2f}{best:>28}{mark}")
    if chosen.gpus > 1:
        lines += ["", f"{'parallel.zero':<16}{'GiB':>8}   on each of {chosen.gpus} GPUs"]
        for stage in (0, 1, 2):
            total = plan_memory(chosen.replace(parallel={"zero": stage}), K, config.micro_batch, T)[0].total
            lines.append(f"{stage:<16}{total / GIB:>8.2f}{'  <-' if stage == chosen.zero else ''}")
    fits = "fits" if made.total <= budget else "does not fit"
    return "\n".join(
        [
            made.show(),
            "shapes in the letters of gpt2_triton/model/buffers.py, live in the phases of a step that need the buffer",
            f"parameters {dims['N']:,}",
            f"micro-batch {config.micro_batch} x {T} tokens, {config.accumulation} in a step, "
            f"recompute {config.memory.recompute}",
            f"{fits} a GPU of {gpu_bytes / GIB:.1f} GiB beside "
            f"{(CONTEXT_BYTES + MODULE_BYTES) / GIB:.2f} GiB for the CUDA context, kernels and graphs",
            "",
            *lines,
        ]
    )


def require_fits(made: Plan, config: Config, K: Any, device: str, texts: int = 0) -> None:
    if device == "cpu":
        free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        has = f"the machine has {total / GIB:.2f} GiB"
    else:
        free, total = torch.cuda.mem_get_info()
        has = f"the GPU has {free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if made.total > free and texts:
        raise OutOfMemoryError(
            f"to decode {texts} texts at once takes {made.total / GIB:.2f} GiB, {has}: set --batch below {texts}"
        )
    if made.total > free:
        _, best = _total_and_largest(config, K, free)
        rows = config.total_batch_tokens // config.train.seq_len // config.gpus
        best = max((B for B in range(1, best + 1) if rows % B == 0), default=0)  # a step's rows must be whole batches
        advice = (
            f"set train.batch_size to {best} and train.total_batch_tokens to {config.total_batch_tokens}, or"
            if best
            else "set"
        )
        raise OutOfMemoryError(
            f"the plan needs {made.total / GIB:.2f} GiB, {has}: {advice} a deeper memory.recompute "
            f"(now batch {config.micro_batch}, {config.memory.recompute}); --plan shows the buffers"
        )
