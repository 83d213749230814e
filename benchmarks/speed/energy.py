"""Measures the power of this GPU by its own counter of energy (NVML), which changes every 100 ms."""

import threading
import time
from collections.abc import Sequence
from typing import Any

INTERVAL = 0.003  # seconds between samples
Sample = tuple[float, float]  # seconds, joules


def mean_watts(samples: Sequence[Sample]) -> float | None:
    """Return the power between the first and the last change of the counter; None if it changed less than twice."""
    changes = [b for a, b in zip(samples, samples[1:]) if b[1] != a[1]]
    if len(changes) < 2:
        return None
    (start, before), (end, after) = changes[0], changes[-1]
    return (after - before) / (end - start)


class Power:
    """The mean power of this GPU in a `with` block, which ends by waiting for the GPU: `watts`, None if it cannot be
    measured: without the package pynvml (nvidia-ml-py), on a GPU without a counter, or in less than 0.3 s.
    """

    watts: float | None = None

    def __init__(self) -> None:
        import torch

        self._samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._gpu: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._counter: Any = pynvml.nvmlDeviceGetTotalEnergyConsumption
            self._counter(self._gpu)
        except (ImportError, AttributeError, pynvml_errors()):
            self._over.set()

    def _sample(self) -> None:
        while not self._over.is_set():
            self._samples.append((time.perf_counter(), self._counter(self._gpu) / 1e3))
            time.sleep(INTERVAL)

    def __enter__(self) -> "Power":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        torch.cuda.synchronize()
        self._over.set()
        self._thread.join()
        self.watts = mean_watts(self._samples)

    def joules(self, seconds: float) -> float | None:
        """Return the energy of so many seconds of the block."""
        return None if self.watts is None else self.watts * seconds


def pynvml_errors() -> type[Exception]:
    """Return the class of NVML's errors, or one that is never raised."""
    try:
        from pynvml import NVMLError
    except ImportError:
        return ImportError
    return NVMLError
