"""The device's stream as the host sees it: marks in it, steps in flight, calls replayed as CUDA graphs.

The host never waits for the step it has just launched.  It launches step s + 1 and then reads the numbers of step s,
so the device always has work.  On a CPU the same calls run at once.
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

STEPS = 3  # in the ring: one being launched, one whose numbers are read, and the one before, where its time began


class Mark:
    """A point in the stream, to wait for and to take times between; on a CPU a moment."""

    def __init__(self, device: str):
        # blocking: a host that waits sleeps, and leaves its core to the threads that pack batches and write checkpoints
        self._event = None if device == "cpu" else torch.cuda.Event(enable_timing=True, blocking=True)
        self._moment = 0.0

    def record(self) -> None:
        if self._event is None:
            self._moment = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Mark") -> float:
        if self._event is None or earlier._event is None:
            return self._moment - earlier._moment
        return earlier._event.elapsed_time(self._event) / 1e3


class Side:
    """A second stream, for work that the first one's need not wait for; on a CPU everything is done in order."""

    def __init__(self, device: str):
        # of high priority: between two kernels that fill the GPU, what is to travel starts first, and is there in time
        self._stream = None if device == "cpu" else torch.cuda.Stream(priority=-1)
        self._ahead = False  # a capture may only wait for a stream that it has work on

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Inside, launches go to this stream, behind all that the current one has so far."""
        if self._stream is None:
            yield
            return
        self._ahead = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """This point of this stream; to be called inside `behind`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """The current stream goes on behind the mark."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def join(self) -> None:
        """The current stream goes on behind all that this one has so far."""
        if self._stream is not None and self._ahead:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._ahead = False


class StepResult(NamedTuple):
    loss: float
    norm: float
    applied: bool  # False: loss or norm was not finite, or an outlier, and AdamW changed nothing
    seconds: float  # from the end of the step before to the end of this one
    z: tuple[float, float]  # z-scores of loss and norm among the last 128; 0 until there are so many
    stop: bool = False  # a rank was asked to stop before this step began

    @property
    def outlier(self) -> bool:
        """Skipped, though its numbers are finite."""
        return not self.applied and math.isfinite(self.loss) and math.isfinite(self.norm)


class Step:
    """One step's numbers on their way: hyper and rng to the device, stats back, in pinned memory of its own.

    The copies run behind the host, so this memory is written again only after `result` has seen the last of them done.
    """

    def __init__(self, device: str, io: Any, watched: Sequence[torch.Tensor] = ()):
        """`io` is kernels/step_io.py, which names the elements of the rows."""
        self._io, pinned = io, device != "cpu"
        self.watched = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in watched]  # copies of statistics
        self.step_in = torch.empty(io.STEP_IN, dtype=torch.float32, pin_memory=pinned)
        self.step_key = torch.empty(io.STEP_KEY, dtype=torch.int32, pin_memory=pinned)
        self.step_out = torch.empty(io.STEP_OUT, dtype=torch.float32, pin_memory=pinned)
        self.z = torch.empty(2, dtype=torch.float32, pin_memory=pinned)
        self.in_flight = False
        self.ended = self._began = Mark(device)

    def begin(self, previous: "Step", hyper: np.ndarray, rng: Sequence[int]) -> None:
        """Its time counts from the end of `previous`, or from now when that was read and the device stands idle."""
        assert not self.in_flight, f"a step's result() has to be read before {STEPS} more begin"
        if not previous.in_flight:
            previous.ended.record()
        self._began = previous.ended
        self.step_in.numpy()[:] = hyper
        self.step_key.numpy()[:] = rng
        self.in_flight = True

    def result(self) -> StepResult:
        """Wait until the step has ended; to be called once."""
        assert self.in_flight, "result() of a step that was not launched or has been read"
        self.ended.wait()
        self.in_flight = False
        out, io = self.step_out.tolist(), self._io
        z_loss, z_norm = self.z.tolist()
        seconds = self.ended.seconds_since(self._began)
        applied, stop = out[io.APPLY] == 1.0, out[io.STOPPING] > 0
        return StepResult(out[io.LOSS], out[io.NORM], applied, seconds, (z_loss, z_norm), stop)


class Replay:
    """Runs functions whose launches are the same in every call with the same arguments.

    The first call launches kernel by kernel, which loads the kernels, and then captures the launches without running
    them; later calls replay the capture.  Memory does not move and what changes from step to step is read from it, so
    addresses and descriptors in the capture stay right.
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

    def forget(self) -> None:
        """Destroy the captures."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()


def capture(function: Callable[..., None], *args: Any) -> torch.cuda.CUDAGraph:
    """The launches of a call, as a graph; none runs."""
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # another model's graphs, collected in mid-capture, would be destroyed, which is not allowed there
    try:
        # thread_local: the prefetch thread may wait for an event meanwhile, which a global capture takes for an error
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function(*args)
    finally:
        gc.enable()
    return graph
