"""A second CUDA stream, for the exchange with other ranks.  On a CPU the same calls
run at once and in order.
"""

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """A second stream; its work overlaps the current stream's work."""

    def __init__(self, device: str):
        # high priority: between two kernels that fill the GPU the side stream's work starts first
        self._stream = None if device == "cpu" else torch.cuda.Stream(priority=-1)
        # during a capture a stream may only wait for a stream that is captured too
        self._used = False

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Put the body's launches on this stream, after everything in the current stream so far."""
        if self._stream is None:
            yield
            return
        self._used = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> torch.cuda.Event | None:
        """Return an event recorded now in this stream; to be called inside `after_current`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for the event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def join(self) -> None:
        """Make the current stream wait for everything in this stream so far."""
        if self._stream is not None and self._used:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._used = False
