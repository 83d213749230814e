"""Compiles the kernels that a piece of host code would launch, on all
cores, without launching them.

    with compiling() as compiled:
        schedule.embed(K, view)
        ...
    compiled.kernels, compiled.from_cache, compiled.seconds

The code calls launchers as in a step, so nobody keeps a list of kernels, types and blocks.
Triton's asynchronous mode compiles and then launches, unless `warmup` is set.  Here a replacement
of `JITFunction.run` sets `warmup`.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel

from gpt2_triton.kernels.replaced import MovableCache


@dataclasses.dataclass
class Compiled:
    """The number of kernels made ready, the number found in Triton's cache on
    disk, and the time for all.
    """

    kernels: int = 0
    from_cache: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def compiling(
    ignore_errors: bool = False, report: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Compiled]:
    """Compile each kernel launched in the context on a thread pool; at its
    end, wait until all are loaded.

    Threads suffice: MLIR's passes, ptxas and gcc run without Python's lock.  With `ignore_errors`,
    a kernel that does not compile, or needs more than the GPU has, raises at its launch instead.
    `report` gets two numbers: launches with a compiled kernel, and all launches.
    """
    out, began, gpu = Compiled(), time.perf_counter(), torch.cuda.current_device()
    launched, cached = [], []
    launch = JITFunction.run

    def compile_only(
        self: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any
    ) -> None:
        launched.append(launch(self, *args, grid=grid, warmup=True, **keywords))

    with ThreadPoolExecutor(os.cpu_count(), initializer=lambda: torch.cuda.set_device(gpu)) as pool:
        with (
            knobs.compilation.scope(),
            knobs.cache.scope(),
            AsyncCompileMode(pool, ignore_errors=ignore_errors),
        ):
            knobs.compilation.listener = lambda *, cache_hit, **_: cached.append(cache_hit)
            knobs.cache.manager_class = knobs.cache.manager_class or MovableCache
            JITFunction.run = compile_only
            try:
                yield out
            finally:
                JITFunction.run = launch
            kernels = set()
            for done, kernel in enumerate(launched, 1):
                kernels.add(
                    kernel.result(ignore_errors) if isinstance(kernel, FutureKernel) else kernel
                )
                report(done, len(launched))
        kernels.discard(None)
        ignored = (Exception,) if ignore_errors else ()  # Triton's and the driver's
        list(pool.map(lambda kernel: _make_launcher(kernel, ignored), kernels))
    # in one thread: Triton 3.6's extensions have one name, and could get another's launcher
    for kernel in kernels:
        with contextlib.suppress(*ignored):
            _ = kernel.run
    out.kernels, out.from_cache, out.seconds = (
        len(kernels),
        sum(cached),
        time.perf_counter() - began,
    )


def _make_launcher(kernel: Any, ignored: tuple[type[Exception], ...]) -> None:
    """Compile the launcher: Triton 3.6 builds a Python extension per signature with
    gcc, and caches it on disk.
    """
    with contextlib.suppress(*ignored):
        driver.active.launcher_cls(kernel.src, kernel.metadata)
