"""Command `compile`: compile the kernels of a run, on a machine that needs no GPU."""

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from cyclopts import Parameter

from gpt2_triton.commands.app import AT_LEAST_1
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.config.config import Config
from gpt2_triton.config.precision import choose_precision
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import print_line
from gpt2_triton.training.start import require_fp8

MAP_NORESERVE = 0x4000  # of Linux; mmap has no name for it


def compile_kernels(
    config: Path,
    /,
    *keys: Annotated[str, Parameter(allow_leading_hyphen=True)],
    gpu: str = "h100",
    gpus: Annotated[int, AT_LEAST_1] = 1,
) -> None:
    """Compile the kernels of a training run, on a machine that needs no GPU, as
    in the build of a container.

    They go to Triton's cache, TRITON_CACHE_DIR or ~/.triton/cache; the folder may be moved.

    A run with the same configuration, package, Triton and Python finds them.
    It compiles others as usual.

    Args:
        config: A recipe or a YAML file, as for `train`.
        keys: Keys of the configuration with other values, as --train.batch_size 32.
        gpu: NVIDIA GPU of the run; an unknown name lists all.
        gpus: Number of GPUs of the run.
    """
    settings = Config.load(config, parse_overrides(keys), gpus)
    shape = StepShape.of(settings, gpus)
    from gpt2_triton import device  # imports torch

    gpu = device.find_gpu(gpu, compiled=True)
    found = device.gpu_of(gpu)
    settings, notes = choose_precision(settings, found.architecture)
    if settings.train.precision == "fp8":
        require_fp8(gpu, found.architecture)
    device.require_triton()
    from triton import knobs

    import gpt2_triton.kernels as K
    from gpt2_triton.kernels.absent_gpu import standing_in
    from gpt2_triton.model.compiling import compile_run
    from gpt2_triton.model.memory_plan import CONTEXT_BYTES, choose_recompute, free_bytes
    from gpt2_triton.model.model import Model

    with standing_in(found):
        settings = choose_recompute(settings, K, free_bytes("cpu") - CONTEXT_BYTES, shape)
        print_line(f"compiling for {gpu}")  # a minute without a cache, where no progress is shown
        model = Model(settings, K, "cpu", group=absent_ranks(gpus))
        made = compile_run(model, {(model.B, model.T)} if settings.eval.every else set())
    for note in notes:
        print_line(note)
    there = f", of which {made.from_cache} were there" if made.from_cache else ""
    print_line(
        f"{made.kernels} kernels for {gpu} are in {knobs.cache.dir}{there}; {made.seconds:.0f} s"
    )


def absent_ranks(gpus: int) -> Any:
    """Return what stands for the process group of a model that computes nothing."""
    return SimpleNamespace(
        size=gpus,
        rank=0,
        device="cpu",
        allocate_shared=_address_space,
        first_on_host=lambda make: make(),
    )


def _address_space(nbytes: int) -> tuple[Any, list[Any]]:
    """Return a tensor whose memory nobody uses, so that it may be larger than this machine's."""
    import numpy as np
    import torch

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)), []
