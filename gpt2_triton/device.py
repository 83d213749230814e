"""The known GPUs: peak speed for the model flops utilisation (MFU), memory for `--plan --gpu NAME`."""

from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    device_names: tuple[str, ...]  # parts of torch.cuda.get_device_name()
    tflops: float  # dense bf16 with fp32 accumulation, from the data sheet
    memory: float  # GiB, the total of torch.cuda.mem_get_info


GPUS = {
    "a100-40": Gpu(("A100-SXM4-40GB", "A100-PCIE-40GB"), 312.0, 39.4),
    "a100-80": Gpu(("A100-SXM4-80GB", "A100 80GB PCIe"), 312.0, 79.1),
    "h100-pcie": Gpu(("H100 PCIe",), 756.0, 79.1),
    "h100": Gpu(("H100 80GB HBM3",), 989.4, 79.1),
    "h200": Gpu(("H200",), 989.4, 139.8),
    "b200": Gpu(("B200",), 2250.0, 178.3),
    "4090": Gpu(("RTX 4090",), 165.2, 23.5),
    "l40s": Gpu(("L40S",), 362.0, 44.4),
}


def present() -> bool:
    return torch.cuda.is_available()


def device_name() -> str:
    """Return the device of tensors: "cuda", or "cpu" for the interpreter."""
    return "cuda" if present() else "cpu"


def peak_flops() -> float | None:
    """Return the dense bf16 flop/s of this machine's GPU; None if there is no GPU or it is not in the table."""
    if not present():
        return None
    name = torch.cuda.get_device_name()
    return next((gpu.tflops * 1e12 for gpu in GPUS.values() if any(part in name for part in gpu.device_names)), None)


def memory_bytes(name: str | None) -> int:
    """Return the memory in bytes of a GPU in the table; without a name, of this machine's GPU, else of an h200."""
    if name is None and present():
        return torch.cuda.mem_get_info()[1]
    return int(GPUS[name or "h200"].memory * 2**30)
