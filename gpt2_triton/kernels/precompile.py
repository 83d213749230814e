"""Compiles the kernels that a piece of host code would launch, on all
cores, without launching them.

    with compiling() as compiled:
        schedule.embed(K, view)
        ...
    compiled.kernels, compiled.from_cache, compiled.seconds

The code calls launchers as in a step, so nobody keeps a list of kernels, types and blocks.
Triton's asynchronous mode asks an executor to compile, and then launches unless `warmup` is set.
Here a replacement of `JITFunction.run` sets `warmup`, and the executor notes what is missing in
Triton's cache.  Forked processes compile that into the cache, where this process finds it.

Threads would wait for each other.  A third of the work is Python's: building the first IR of each
kernel.  The rest allocates, and maps memory, in one address space.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from triton import JITFunction, knobs
from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode, FutureKernel, active_mode

from gpt2_triton.kernels.replaced import Absent, MovableCache, only_reading


@dataclasses.dataclass
class Compiled:
    """The number of kernels made ready, the number found in Triton's cache on
    disk, and the time for all.
    """

    kernels: int = 0
    from_cache: int = 0
    seconds: float = 0.0


class _Missing(NamedTuple):
    """A kernel that Triton's cache lacks."""

    source: int  # letters of its source, and of what it calls
    compile: Callable[[], Any]
    kernel: Future[Any]


class _Executor:
    """Reads kernels from Triton's cache at once, and keeps the calls that compile others."""

    def __init__(self) -> None:
        self.found = 0
        self.launched: JITFunction
        self.missing: list[_Missing] = []

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        kernel: Future[Any] = Future()
        try:
            kernel.set_result(compile())
            self.found += 1
        except Absent:
            functions = _with_callees(self.launched, set())
            source = sum(len(function.src) for function in functions)
            self.missing.append(_Missing(source, compile, kernel))
        return kernel


def _with_callees(function: JITFunction, found: set[JITFunction]) -> set[JITFunction]:
    """Add a kernel, and all functions that it calls, to `found`; return it."""
    found.add(function)
    for name in function.fn.__code__.co_names:
        callee = function.fn.__globals__.get(name)
        if isinstance(callee, JITFunction) and callee not in found:
            _with_callees(callee, found)
    return found


@contextlib.contextmanager
def compiling(
    ignore_errors: bool = False, report: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Compiled]:
    """Compile each kernel launched in the context on all cores; at its end all are loaded.

    With `ignore_errors`, a kernel that does not compile, or needs more than the GPU has, raises
    at its launch instead.  `report` gets two numbers: kernels compiled, and kernels to compile.
    """
    out = Compiled()
    began = time.perf_counter()
    launched: dict[Any, None] = {}
    launch = JITFunction.run
    executor = _Executor()

    def compile_only(
        self: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any
    ) -> None:
        executor.launched = self
        launched[launch(self, *args, grid=grid, warmup=True, **keywords)] = None

    with knobs.cache.scope():
        manager = knobs.cache.manager_class or MovableCache
        knobs.cache.manager_class = only_reading(manager)
        mode = active_mode.set(AsyncCompileMode(executor))
        JITFunction.run = compile_only
        try:
            yield out
        finally:
            JITFunction.run = launch
            active_mode.reset(mode)
            knobs.cache.manager_class = manager
        # the kernels with most source take longest
        executor.missing.sort(key=lambda missing: missing.source, reverse=True)
        _compile_in_children([missing.compile for missing in executor.missing], report)
        for missing in executor.missing:
            try:
                kernel = missing.compile()  # reads it, or fails as it did in the child
                missing.kernel.set_result(kernel)
            except Exception as error:
                missing.kernel.set_exception(error)
    kernels = {
        kernel.result(ignore_errors) if isinstance(kernel, FutureKernel) else kernel
        for kernel in launched
    }
    kernels.discard(None)
    ignored = (Exception,) if ignore_errors else ()  # Triton's and the driver's
    for kernel in kernels:
        with contextlib.suppress(*ignored):
            _ = kernel.run
    out.kernels = len(kernels)
    out.from_cache = executor.found
    out.seconds = time.perf_counter() - began


def _compile_in_children(
    calls: list[Callable[[], Any]], report: Callable[[int, int], None]
) -> None:
    """Compile in forks, which inherit the calls, and take the next number when free."""
    numbers, numbers_in = os.pipe()
    done, done_in = os.pipe()
    os.write(numbers_in, array("H", range(len(calls))).tobytes())
    os.close(numbers_in)
    target = driver.active.get_current_target()
    fork = multiprocessing.get_context("fork")
    size = min(len(calls), len(os.sched_getaffinity(0)))
    children = [
        fork.Process(target=_compile_some, args=(calls, target, numbers, done_in), daemon=True)
        for _ in range(size)
    ]
    for child in children:
        child.start()
    os.close(numbers)
    os.close(done_in)
    compiled = 0
    while os.read(done, 1):  # empty once all children have ended
        compiled += 1
        report(compiled, len(calls))
    os.close(done)
    for child in children:
        child.join()


def _compile_some(calls: list[Callable[[], Any]], target: Any, numbers: int, done: int) -> None:
    """Compile kernels until no number is left.  The parent reports what does not compile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver.active.get_current_target = lambda: target  # a fork may not ask CUDA
    while number := os.read(numbers, 2):
        with contextlib.suppress(Exception):
            kernel = calls[array("H", number)[0]]()
            # Triton 3.6 builds a Python extension per signature with gcc
            driver.active.launcher_cls(kernel.src, kernel.metadata)
        os.write(done, b".")
