"""The device of a process, its GPU or Triton's interpreter, its free
memory, and a table of known GPUs.

The table has peak speeds, for the model flops utilisation (MFU), and
memory, for `--plan --gpu NAME`.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from gpt2_triton.errors import ConfigError
from gpt2_triton.version import installed, triton_notice


class Gpu(NamedTuple):
    """What plans and speeds need to know of a kind of GPU."""

    device_names: tuple[str, ...]  # parts of torch.cuda.get_device_name()
    architecture: str  # as architecture() returns it
    tflops: float  # dense bf16 with fp32 accumulation, from the vendor's data sheet
    memory: float  # GiB, the total of torch.cuda.mem_get_info
    multiprocessors: int = 0  # of NVIDIA's GPUs


GPUS = {
    "a100-40": Gpu(("A100-SXM4-40GB", "A100-PCIE-40GB"), "8.0", 312.0, 39.4, 108),
    "a100-80": Gpu(("A100-SXM4-80GB", "A100 80GB PCIe"), "8.0", 312.0, 79.1, 108),
    "h100-pcie": Gpu(("H100 PCIe",), "9.0", 756.0, 79.1, 114),
    "h100": Gpu(("H100 80GB HBM3",), "9.0", 989.4, 79.1, 132),
    "h200": Gpu(("H200",), "9.0", 989.4, 139.8, 132),
    "b200": Gpu(("B200",), "10.0", 2250.0, 178.3, 148),
    "4090": Gpu(("RTX 4090",), "8.9", 165.2, 23.5, 128),
    "l40s": Gpu(("L40S",), "8.9", 362.0, 44.4, 142),
    # below, peaks were not checked in data sheets, and memory was not read on the GPUs
    "3090": Gpu(("RTX 3090",), "8.6", 71.0, 23.5, 82),
    "5080": Gpu(("RTX 5080",), "12.0", 112.6, 15.4, 84),
    "5090": Gpu(("RTX 5090",), "12.0", 209.5, 31.3, 170),
    "mi300x": Gpu(("MI300X",), "gfx942", 1307.4, 191.9),
    "mi355x": Gpu(("MI355X",), "gfx950", 2516.6, 287.9),
    "7900xtx": Gpu(("RX 7900 XTX",), "gfx1100", 122.8, 23.9),
}
CGROUP = Path("/sys/fs/cgroup")
CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
NO_GPU = "no CUDA GPU found: the kernels run in Triton's interpreter on the CPU"
DEFAULT = "h100"  # in plans without a GPU: docs/results has its figures
# in the place of a key, for any other GPU; vendors write GB for GiB
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?G(?:i?B)?", re.IGNORECASE)
UNKNOWN = "unknown"  # architecture of that


def find_gpu(name: str, compiled: bool = False) -> str:
    """Return the key of a GPU given by key, as "RTX4090" or "A100-80GB" too, or by torch's
    name, or a SIZE; ConfigError lists the keys that `name` may mean, else all.

    compiled   only a GPU for which kernels are compiled, and no SIZE
    """
    if SIZE.fullmatch(name) and not compiled:
        return name
    keys = {_plain(key): key for key, gpu in GPUS.items() if gpu.multiprocessors or not compiled}
    plain = _plain(name)
    for short, key in keys.items():
        if plain == short or is_called(name, *GPUS[key].device_names):
            return key
    # of its family, as of A100 or H100 NVL; an A10 is of no family here
    near = [key for key in keys.values() if plain.startswith(key.partition("-")[0])]
    size = "" if compiled else ", or its memory, as 24GiB"
    raise ConfigError(f"--gpu: expected {', '.join(near or keys.values())}{size}; got {name}")


def _plain(name: str) -> str:
    """Return a GPU's name without what people may leave out: case, separators, RTX and GB."""
    return re.sub(r"^rt?x|gi?b?$|[ _-]", "", name.lower())


def gpu_of(key: str) -> Gpu:
    """Return the GPU of a key or SIZE."""
    size = SIZE.fullmatch(key)
    return Gpu((), UNKNOWN, 0.0, float(size[1])) if size else GPUS[key]


def is_called(name: str, *parts: str) -> bool:
    """Return whether torch's name has a part as whole words, not before
    "Laptop": a GH200 is no H200.
    """
    return (
        re.search(rf"(?<!\w)({'|'.join(map(re.escape, parts))})(?!\w| Laptop)", name, re.IGNORECASE)
        is not None
    )


def present() -> bool:
    """Return whether this process sees a GPU."""
    return torch.cuda.is_available()


def count() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count()


def select_interpreter() -> bool:
    """Select Triton's interpreter if there is no GPU, before a kernel is imported;
    ConfigError if it cannot run.
    """
    require_triton()
    if present():
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    if triton_notice() is None:  # the parts that make_fast replaces may be others in a newer Triton
        from gpt2_triton.interpreter import make_fast

        make_fast()
    return True


def require_triton() -> str:
    """Return the version of Triton; ConfigError if it is missing.  torch for
    CPUs does not install Triton.
    """
    version = installed("triton")
    if version is None:
        raise ConfigError("triton: not installed; pip install triton, on Linux or WSL2")
    return version


def architecture() -> str:
    """Return the architecture of this machine's GPU: the compute capability, such as
    "9.0", or AMD's "gfx942".
    """
    if torch.version.hip:  # AMD's GPUs have compute capabilities too, some equal to NVIDIA's
        return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.partition(
            ":"
        )[0]
    return "{}.{}".format(*torch.cuda.get_device_capability())


def has_fp8(architecture: str) -> bool:
    """Return True if this architecture multiplies e4m3; AMD's earlier GPUs
    have another 8-bit format.
    """
    if architecture.startswith("gfx"):
        return architecture == "gfx950"
    return tuple(int(part) for part in architecture.split(".")) >= (8, 9)


def local_gpu() -> int:
    """Return the number of this rank's GPU; SLURM may make only one visible to each process."""
    return int(os.environ.get("LOCAL_RANK", "0")) % count()


def device_name() -> str:
    """Return the device of tensors: "cuda", or "cpu" for the interpreter."""
    return "cuda" if present() else "cpu"


def name() -> str:
    """Return what executes the kernels, for records and messages: torch's
    name of this machine's GPU.
    """
    return torch.cuda.get_device_name()


def own_key() -> str | None:
    """Return the key of this machine's GPU; None if there is no GPU or it is not in the table."""
    with suppress(ConfigError):
        return find_gpu(torch.cuda.get_device_name()) if present() else None
    return None


def peak_flops() -> float | None:
    """Return the dense bf16 flop/s of this machine's GPU; None if there is no GPU
    or it is not in the table.
    """
    key = own_key()
    return GPUS[key].tflops * 1e12 if key else None


def memory_bytes(name: str | None) -> int:
    """Return bytes of memory: of the GPU `name`, a key or SIZE, else of this
    rank's GPU, else of DEFAULT.
    """
    if name is None and present():
        return torch.cuda.mem_get_info(local_gpu())[1]
    return int(gpu_of(name or DEFAULT).memory * 2**30)


def free_and_total_bytes(device: str) -> tuple[int, int]:
    """Return (free, total) bytes of memory for tensors: the GPU's, or the machine's for "cpu"."""
    return _host_memory() if device == "cpu" else torch.cuda.mem_get_info()


def _host_memory() -> tuple[int, int]:
    """Return (available, total) bytes of the machine or container; page cache is available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {key: int(value.split()[0]) for key, value in (line.split(":") for line in lines)}
    found = [(1024 * kib["MemAvailable"], 1024 * kib["MemTotal"]), *_limits()]
    return min(available for available, _ in found), min(total for _, total in found)


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (available, total) bytes of each control group of this process with a
    limit: a container's, or a job's.

    A container sees its own group at CGROUP, and /proc may name a path outside of it.
    """
    lines = CGROUPS_OF_PROCESS.read_text().splitlines() if CGROUPS_OF_PROCESS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        root = CGROUP / "memory" if is_v1 else CGROUP
        limit, used = ("memory.limit_in_bytes", "total_rss") if is_v1 else ("memory.max", "anon")
        own = root / path.strip("/")
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):  # no such file, or no limit: "max"
                total = int((group / limit).read_text())
                rows = (group / "memory.stat").read_text().splitlines()
                yield total - int(dict(row.split() for row in rows)[used]), total
