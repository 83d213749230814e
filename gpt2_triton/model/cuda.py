"""Events and CUDA graphs.  On a CPU the same calls run at once."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch


class DeviceEvent:
    """An event in the current stream, to wait for and to measure time from; on a CPU a moment."""

    def __init__(self, device: str):
        # blocking: a waiting host thread sleeps, which frees its core for the
        # prefetch and checkpoint threads
        self._event = (
            None if device == "cpu" else torch.cuda.Event(enable_timing=True, blocking=True)
        )
        self._moment = 0.0

    def record(self) -> None:
        if self._event is None:
            self._moment = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        if self._event is None or earlier._event is None:
            return self._moment - earlier._moment
        return earlier._event.elapsed_time(self._event) / 1e3


class GraphCache:
    """Runs functions as CUDA graphs; equal arguments must always give equal launches.

    The first call launches kernel by kernel, which loads the kernels.  Then it captures the
    launches without running them, and later calls replay the capture.  Addresses and
    descriptors in a capture stay valid: nothing in the arena moves, and kernels read from the
    arena what changes from step to step.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}

    def __call__(self, function: Callable[..., None], *args: Any) -> None:
        key = (function.__name__, *args)
        if key in self._graphs:
            self._graphs[key].replay()
        else:
            function(*args)
            self._graphs[key] = capture(function, *args)

    def reset(self) -> None:
        """Destroy the captures."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()


def capture(function: Callable[..., None], *args: Any) -> torch.cuda.CUDAGraph:
    """Return the launches of a call as a graph, without running them."""
    graph = torch.cuda.CUDAGraph()
    # a collection could destroy another model's graphs, which CUDA forbids during a capture
    gc.disable()
    try:
        # thread_local: a global capture treats the prefetch thread's wait for an event as an error
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function(*args)
    finally:
        gc.enable()
    return graph
