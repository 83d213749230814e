"""Another GPU's code on a Hopper GPU.  A driver that launches nothing stands
for the GPU; Triton compiles.

python -m tests.benchmarks.test_as_gpu CODE|own FOLDER      compile a kernel with Triton's
                                                            cache in the folder
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import as_gpu
from gpt2_triton import device
from gpt2_triton.errors import ConfigError
from tests.support.elsewhere import compiled_elsewhere

HOPPER = "NVIDIA H100 80GB HBM3"
A100, OWN = 80, "own"


def compile_on_hopper(code: str, folder: str) -> None:
    """Print what the package and Triton see under `code`, and a compiled kernel; OWN is
    an A100 with its own code.
    """
    import torch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from gpt2_triton.kernels.absent_gpu import absent_driver, show

    torch.cuda.is_available = lambda: True
    show(device.GPUS["a100-80" if code == OWN else "h100"])
    driver.set_active(absent_driver(GPUTarget("cuda", A100 if code == OWN else 90, 32)))
    knobs.cache.dir = folder
    if code != OWN:
        as_gpu.execute_as(code)
    from gpt2_triton.kernels import table_file, tuning
    from gpt2_triton.kernels.philox import _fill_kernel

    kernel = _fill_kernel.warmup(torch.empty(64), 64, 1.0, BLOCK=64, grid=(1,))
    found = dict(
        name=device.name(), torch=torch.cuda.get_device_name(), architecture=device.architecture()
    )
    found |= dict(
        table=table_file.table_name(), hopper=tuning.is_hopper(), peak=device.peak_flops()
    )
    found |= dict(
        folder=knobs.cache.dir,
        shared=driver.active.utils.get_device_properties(0)["max_shared_mem"],
    )
    print(json.dumps(found | dict(ptx=kernel.asm["ptx"], machine=machine_of(kernel.asm["cubin"]))))


def machine_of(cubin: bytes) -> int:
    """Return the architecture whose machine code this is, as 90."""
    import triton

    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [disassembler, file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"EF_CUDA_SM(\d+)|\.target\s+sm_(\d+)", text)  # of either format of ptxas
    assert found, text[:300]
    return int(found[1] or found[2])


def compiled(code: str, folder: Path) -> dict[str, Any]:
    printed = compiled_elsewhere("-m", "tests.benchmarks.test_as_gpu", code, str(folder))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.slow
def test_an_a100_s_code_is_assembled_for_hopper_and_not_found_by_an_a100(tmp_path):
    found, own = compiled("a100", tmp_path / "cache"), compiled(OWN, tmp_path / "cache_sm_80_code")
    assert ".target sm_80" in found["ptx"] and found["machine"] == 90
    assert (found["name"], found["torch"]) == (f"sm_80 code on {HOPPER}", own["torch"])
    assert (found["architecture"], found["table"], found["hopper"]) == ("8.0", "a100", False)
    assert (found["shared"], found["peak"]) == (163 * 1024, None)
    assert found["folder"] == own["folder"]  # this test's: a user's A100 has no such folder
    assert own["machine"] == A100 and own["ptx"] == found["ptx"]
    assert (
        len(list((tmp_path / "cache_sm_80_code").iterdir())) == 2
        and not (tmp_path / "cache").exists()
    )


@pytest.mark.slow
def test_the_portable_code_of_hopper_is_compiled_for_hopper(tmp_path):
    found = compiled("h100-portable", tmp_path / "cache")
    assert ".target sm_90a" in found["ptx"] and found["machine"] == 90
    assert (found["name"], found["torch"]) == (f"portable sm_90 code on {HOPPER}", HOPPER)
    assert (found["architecture"], found["hopper"], found["peak"]) == ("9.0", False, None)
    assert found["folder"] == str(tmp_path / "cache_portable_sm_90_code")


def test_other_gpus_are_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(device, "present", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        as_gpu.main(["a100", "pytest"])
    assert capsys.readouterr().err.startswith("error: as_gpu: ")
    monkeypatch.setattr(device, "present", lambda: True)
    monkeypatch.setattr(device, "architecture", lambda: "8.9")
    monkeypatch.setattr(device, "name", lambda: "NVIDIA L40S")
    with pytest.raises(ConfigError, match="found NVIDIA L40S"):
        as_gpu.execute_as("a100")


def test_a_module_gets_its_own_words(monkeypatch, tmp_path, capsys):
    (tmp_path / "standin.py").write_text("import sys; print(__name__, sys.argv)")
    monkeypatch.setattr(as_gpu, "execute_as", print)
    monkeypatch.setattr(sys, "argv", ["as_gpu"])
    monkeypatch.syspath_prepend(tmp_path)
    as_gpu.main(["rtx3090", "standin", "--as", "a100", "-q"])
    assert (
        capsys.readouterr().out
        == f"rtx3090\n__main__ ['{tmp_path}/standin.py', '--as', 'a100', '-q']\n"
    )


if __name__ == "__main__":
    compile_on_hopper(*sys.argv[1:])
