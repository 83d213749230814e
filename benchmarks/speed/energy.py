"""Measures the power of this GPU by its own energy counter (NVML), which changes every 100 ms."""

import threading
import time
from collections.abc import Callable, Sequence

import torch

INTERVAL = 0.003  # seconds between samples
Sample = tuple[float, float]  # seconds, joules


def mean_watts(samples: Sequence[Sample]) -> float | None:
    """Return the power between the first and the last change of the counter; None
    for fewer than two changes.
    """
    changes = [b for a, b in zip(samples, samples[1:]) if b[1] != a[1]]
    if len(changes) < 2:
        return None
    (start, before), (end, after) = changes[0], changes[-1]
    return (after - before) / (end - start)


class Power:
    """Measures the mean power of this GPU, `watts`, in a `with` block.  The end of
    the block waits for the GPU.

    `watts` is None without the package nvidia-ml-py, on a GPU without a counter, and
    for a block of less than 0.3 s.
    """

    watts: float | None = None

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._joules = _reader("nvmlDeviceGetTotalEnergyConsumption")
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while self._joules and not self._over.is_set():
            self._samples.append((time.perf_counter(), self._joules()))
            time.sleep(INTERVAL)

    def __enter__(self) -> "Power":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self._over.set()
        self._thread.join()
        self.watts = mean_watts(self._samples)

    def joules(self, seconds: float) -> float | None:
        """Return the energy of this many seconds at the mean power."""
        return None if self.watts is None else self.watts * seconds


def _reader(name: str) -> Callable[[], float] | None:
    """Return a function that reads a value of this GPU, in thousandths, from NVML; None
    if NVML does not give it.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        value = getattr(pynvml, name)
        value(gpu)
    except (AttributeError, pynvml.NVMLError):  # AttributeError: AMD's devices have no uuid
        return None
    return lambda: value(gpu) / 1e3


def power_limit() -> float | None:
    """Return the power limit of this GPU in watts; None if NVML does not give it."""
    read = _reader("nvmlDeviceGetEnforcedPowerLimit")
    return read() if read else None
