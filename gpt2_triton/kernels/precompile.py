"""Compile every kernel that a piece of host code would launch, on all cores, and launch none.

    with compiling() as compiled:
        schedule.embed(K, view)
        ...
    compiled.kernels, compiled.from_cache, compiled.seconds

Which kernels there are, for which types and blocks, the launchers themselves say: no list of them is kept.  Triton 3.6
and later compile asynchronously, but only launches with `warmup` set do no more than that; hence the other `run`.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel


@dataclasses.dataclass
class Compiled:
    """How many kernels were made ready, how many of them Triton's cache on disk had, and how long all took."""

    kernels: int = 0
    from_cache: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def compiling(ignore_errors: bool = False) -> Iterator[Compiled]:
    """Inside, a launch only hands its kernel to a pool of threads; at the end all are compiled and loaded.

    Gluon's kernels are JITFunctions too.  Threads do: MLIR's passes, ptxas and gcc run outside Python's lock.  With
    `ignore_errors` a kernel that does not compile, or needs more than the GPU has, is left for its launch to raise.
    """
    out, began, gpu = Compiled(), time.perf_counter(), torch.cuda.current_device()
    asked, cached = [], []
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        asked.append(launch(self, *args, grid=grid, warmup=True, **keywords))

    with ThreadPoolExecutor(os.cpu_count(), initializer=lambda: torch.cuda.set_device(gpu)) as pool:
        with knobs.compilation.scope(), AsyncCompileMode(pool, ignore_errors=ignore_errors):
            knobs.compilation.listener = lambda *, cache_hit, **_: cached.append(cache_hit)
            JITFunction.run = compile_only
            try:
                yield out
            finally:
                JITFunction.run = launch
        kernels = {_result(kernel, ignore_errors) for kernel in asked} - {None}
        passed_over = (Exception,) if ignore_errors else ()  # Triton's and the driver's
        list(pool.map(lambda kernel: _make_launcher(kernel, passed_over), kernels))
    for kernel in kernels:
        _load(kernel, passed_over)
    out.kernels, out.from_cache, out.seconds = len(kernels), sum(cached), time.perf_counter() - began


def _result(kernel: Any, ignore_errors: bool) -> Any:
    return kernel.result(ignore_errors) if isinstance(kernel, FutureKernel) else kernel


def _make_launcher(kernel: Any, passed_over: tuple[type[Exception], ...]) -> None:
    """Triton 3.6 has gcc make a Python extension for each signature, and finds it on disk from then on."""
    with contextlib.suppress(*passed_over):
        driver.active.launcher_cls(kernel.src, kernel.metadata)


def _load(kernel: Any, passed_over: tuple[type[Exception], ...]) -> None:
    """One at a time: 3.6's extensions have one name, and one that is loaded already comes as the module of another,
    overwritten.  A thread could so end up with the launcher of another thread's kernel.
    """
    with contextlib.suppress(*passed_over):
        _ = kernel.run
