"""Another GPU's code on a Hopper GPU.  A driver that launches nothing stands for the GPU; Triton
compiles.

python -m tests.benchmarks.test_as_gpu CODE FOLDER    compile a kernel, with Triton's cache there
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import as_gpu
from gpt2_triton import device
from tests.support.elsewhere import compiled_elsewhere

HOPPER = "NVIDIA H100 80GB HBM3"


def compile_on_hopper(code: str, folder: str) -> None:
    """Print what the package and Triton see under `code`, and what they compile."""
    import torch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from gpt2_triton.kernels.absent_gpu import absent_driver, show

    torch.cuda.is_available = lambda: True
    show(device.GPUS["h100"])
    driver.set_active(absent_driver(GPUTarget("cuda", 90, 32)))
    knobs.cache.dir = folder
    as_gpu.execute_as(code)
    from gpt2_triton.kernels import table_file, tuning
    from gpt2_triton.kernels.philox import _fill_kernel

    kernel = _fill_kernel.warmup(torch.empty(64), 64, 1.0, BLOCK=64, grid=(1,))
    found = dict(name=device.name(), architecture=device.architecture(), peak=device.peak_flops())
    found |= dict(table=table_file.table_name(), hopper=tuning.is_hopper(), folder=knobs.cache.dir)
    found |= dict(ptx=re.findall(r"\.target (\S+)", kernel.asm["ptx"]))
    found |= dict(machine=machine_of(kernel.asm["cubin"]))
    properties = driver.active.utils.get_device_properties(0)
    print(json.dumps(found | dict(shared=properties["max_shared_mem"])))


def machine_of(cubin: bytes) -> int:
    """Return the architecture whose machine code this is, as 90."""
    import triton

    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        words = [disassembler, file.name]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"EF_CUDA_SM(\d+)|\.target\s+sm_(\d+)", text)  # of either format of ptxas
    assert found, text[:300]
    return int(found[1] or found[2])


PORTABLE = dict(name="portable sm_90 code", architecture="9.0", ptx=["sm_90a"])
A100 = dict(name="sm_80 code", architecture="8.0", ptx=["sm_80"], table="a100", shared=163 * 1024)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "expected"), [("a100", A100), ("h100-portable", PORTABLE)])
def test_other_code_is_assembled_for_hopper_and_named(code, expected, tmp_path):
    """In a folder of Triton's cache in which no other code is found."""
    folder = tmp_path / "cache"
    printed = compiled_elsewhere("-m", "tests.benchmarks.test_as_gpu", code, str(folder))
    found = json.loads(printed.splitlines()[-1])
    name = expected["name"]
    assert found["folder"] == f"{folder}_{name.replace(' ', '_')}" and not folder.exists()
    expected = expected | dict(name=f"{name} on {HOPPER}", machine=90, hopper=False, peak=None)
    assert expected.items() <= found.items()


if __name__ == "__main__":
    compile_on_hopper(*sys.argv[1:])
