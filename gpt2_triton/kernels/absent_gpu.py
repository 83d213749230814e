"""A GPU that is not on this machine, for which Triton compiles in a
process that does nothing else.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver

from gpt2_triton import device
from gpt2_triton.errors import ConfigError

MODULE = 1, 1, 32, 0, 1024  # as loaded: module, function, registers, spills, most threads
KIB = 1024
# bytes that a program may take, by architecture as Triton names it
SHARED_MEMORY: dict[int | str, int] = {
    80: 163 * KIB,
    86: 99 * KIB,
    89: 99 * KIB,
    90: 227 * KIB,
    100: 227 * KIB,
    120: 99 * KIB,
    "gfx942": 64 * KIB,
    "gfx950": 160 * KIB,
    "gfx1100": 64 * KIB,
}


def absent_driver(target: GPUTarget, number: int = 0) -> Any:
    """Return a driver for Triton that loads and launches nothing; `number` keeps kernels
    of several targets apart.
    """
    utils = SimpleNamespace(
        get_device_properties=lambda _: dict(max_shared_mem=1 << 30),
        load_binary=lambda *_: MODULE,
        unload_module=lambda _: None,
    )
    return SimpleNamespace(
        utils=utils,
        launcher_cls=lambda *_: lambda *_: None,
        get_current_target=lambda: target,
        get_current_device=lambda: number,
        get_current_stream=lambda _: 0,
    )


class _NotLoaded:
    """A C module of Triton's, which is built here, and needs the GPU's
    driver where it is loaded.
    """

    def __getattr__(self, name: str) -> None:
        return None


def _build_launcher(source: Any, metadata: Any) -> Any:
    if hasattr(nvidia, "make_launcher"):  # Triton 3.6 has a C module for each signature
        nvidia.CudaLauncher(source, metadata)
    return lambda *_: None


def show(gpu: device.Gpu) -> int:
    """Let torch give the name and the compute capability of a GPU of NVIDIA's;
    return its architecture, as 80.
    """
    major, minor = (int(part) for part in gpu.architecture.split("."))
    torch.cuda.get_device_name = lambda *_: f"NVIDIA {gpu.device_names[0]}"
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    return 10 * major + minor


@contextlib.contextmanager
def standing_in(gpu: device.Gpu) -> Iterator[None]:
    """Let torch, Triton and this package find a GPU of NVIDIA's, its memory on the
    host.  They remain changed.
    """
    architecture = show(gpu)
    memory = int(gpu.memory * 2**30)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda _: None
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        multi_processor_count=gpu.multiprocessors
    )
    device._host_memory = lambda: (memory, memory)
    active = absent_driver(GPUTarget("cuda", architecture, 32))
    driver.set_active(active)
    os.makedirs(knobs.cache.dir, exist_ok=True)  # its error would be taken for the compiler's
    active.launcher_cls = _build_launcher
    build._load_module_from_path = lambda name, path: _NotLoaded()
    # with what Triton links its C modules, in place of the driver's
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "-shared",
            "-x",
            "c",
            "-",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            f"{folder}/libcuda.so.1",
        ]
        knobs.nvidia.libcuda_path = folder
        try:
            # one function that all of them call: else the linker leaves the library
            # out of those that it must load
            subprocess.run(
                [os.environ.get("CC", "gcc"), *words],
                check=True,
                input=b"void cuGetErrorString(void) {}",
            )
            nvidia.CudaUtils()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            todo = "Triton needs gcc and Python's headers: apt install gcc python3-dev"
            raise ConfigError(f"{error}; {todo}") from error
        yield
