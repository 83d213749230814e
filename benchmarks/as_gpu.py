"""Executes the code of another GPU on a Hopper GPU: all that a module launches, in one process.

    python -m benchmarks.as_gpu a100|rtx3090|rtx4090|h100-portable MODULE [ARGUMENTS]

    python -m benchmarks.as_gpu a100 pytest -m gpu tests/gpu
    python -m benchmarks.as_gpu rtx4090 gpt2_triton train
    configs/quickstart.yaml --run_dir runs/sm_89

a100, rtx3090, rtx4090: torch and the package see that GPU's name and compute capability, Triton
also its shared memory.  Triton compiles PTX for it, and ptxas makes Hopper's machine code of the
PTX.  So what the older GPU would run is executed (mma.sync, cp.async): results can be checked, and
code that is slow for a reason of its own is slow here too.  Multiprocessors, caches, memory and
the rate of the tensor cores remain Hopper's: compare such times with each other, never with the
older GPU's.  sm_89's products in fp8 have no instruction on Hopper, and ptxas widens them: check
their results, not their times.

h100-portable: the portable kernels compiled for Hopper, in place of kernels/hopper.

Records, tables and messages name what was executed, as "sm_80 code on NVIDIA H100 80GB HBM3".
Triton's cache has a folder for each kind of code, and other keys, so that the older GPU never finds
Hopper's machine code.  A process that the module starts executes this GPU's own code, unless it is
started by this program too.

Seen with Triton 3.6, 3.8 and 3.9.
"""

import argparse
import functools
import runpy
import sys
from typing import Any, Literal, get_args

from gpt2_triton.errors import ConfigError

# torch and kernels are imported in functions: the commands select the device before
Code = Literal["a100", "rtx3090", "rtx4090", "h100-portable"]
# keys of device.GPUS
KEYS: dict[str, str] = {"a100": "a100-80", "rtx3090": "3090", "rtx4090": "4090"}
HOPPER = "9.0"
HERE = 90  # for which ptxas assembles; Triton asks torch, which names the other GPU


def program(code: Code | None) -> tuple[str, ...]:
    """Return the words between `python -m` and a module with which the module executes the code."""
    return ("benchmarks.as_gpu", code) if code else ()


def title(code: Code) -> str:
    """Return what is executed, as "sm_80 code"."""
    from gpt2_triton import device

    if code not in KEYS:
        return "portable sm_90 code"
    return f"sm_{device.GPUS[KEYS[code]].architecture.replace('.', '')} code"


def require_hopper() -> None:
    """Raise ConfigError unless this machine has a Hopper GPU."""
    from gpt2_triton import device

    if not device.present():
        raise ConfigError("as_gpu: needs a Hopper GPU (H100, H200), found no GPU")
    if device.architecture() != HOPPER:
        raise ConfigError(f"as_gpu: needs a Hopper GPU (H100, H200), found {device.name()}")


def execute_as(code: Code | None) -> None:
    """Let torch, Triton and this package take this Hopper GPU for another; they remain changed.

    Call it before a kernel is launched; None changes nothing.
    ConfigError if this is no Hopper GPU.
    """
    if code is None:
        return
    require_hopper()
    from triton import knobs

    from gpt2_triton import device
    from gpt2_triton.kernels import tuning
    from gpt2_triton.kernels.absent_gpu import show

    named = f"{title(code)} on {device.name()}"
    device.name = lambda: named
    device.peak_flops = lambda: None
    knobs.cache.dir = f"{knobs.cache.dir}_{title(code).replace(' ', '_')}"
    if code in KEYS:
        _compile_for(show(device.GPUS[KEYS[code]]))
    else:
        tuning.is_hopper = functools.cache(lambda: False)


def _compile_for(architecture: int) -> None:
    """Let Triton compile for an architecture of NVIDIA's, but assemble for this GPU's."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler
    from triton.runtime import driver

    from gpt2_triton.kernels.absent_gpu import SHARED_MEMORY

    active: Any = driver.active
    backend: Any = compiler.CUDABackend
    target = GPUTarget("cuda", architecture, 32)
    assemble = backend.make_cubin
    key = backend.hash
    properties = active.utils.get_device_properties

    def limited(gpu: int) -> dict[str, int]:
        found: dict[str, int] = properties(gpu)
        return found | dict(max_shared_mem=SHARED_MEMORY[architecture])

    active.get_current_target = lambda: target
    active.utils.get_device_properties = limited
    backend.make_cubin = lambda self, ptx, metadata, options, _: assemble(
        self, ptx, metadata, options, HERE
    )
    backend.hash = lambda self: f"{key(self)}, assembled for sm_{HERE}"


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("code", choices=get_args(Code))
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    try:
        execute_as(given.code)
    except ConfigError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    sys.argv = [given.module, *given.arguments]
    runpy.run_module(given.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
