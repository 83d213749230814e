"""Kernels access 16 bytes per thread and instruction (as with llm.c's
Packed128), read from machine code.

Bandwidth-bound kernels are read in Hopper's SASS, the operands of products in
the code of a GPU without TMA.

python -m tests.kernels.test_wide_accesses   kernel, accesses of global memory by their bits
python -m tests.kernels.test_wide_accesses sm_89      faults of the kernels that multiply
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kernels import compile_targets
from tests.kernels.compile_targets import OTHER_RUNS, PRODUCTS, TARGETS, compile_for, faults
from tests.support.elsewhere import compiled_elsewhere

KERNELS = {
    "adamw": "_adamw_kernel",
    "embedding_fwd": "_embedding_fwd_kernel",
    "layernorm_fwd": "_layernorm_fwd_kernel",
    "layernorm_bwd": "_layernorm_bwd_kernel",
    "sum_squares": "_sum_squares_kernel",
    "muon_momentum": "_momentum_kernel",
}
ALL_RUNS = (*compile_targets.RUNS, *OTHER_RUNS)
# of products by pointers: target -> runs; sm_89 has fp8 too
RUNS = {
    "sm_80": ("bf16", "bf16, recompute"),
    "sm_86": ("bf16",),  # of the same table as sm_89
    "sm_89": ALL_RUNS,
    "gfx942": ("bf16", "bf16, muon"),
    "gfx1100": ("bf16", "bf16, wide heads"),
}


def accesses(cubin: bytes) -> Counter[int]:
    """Count a kernel's global loads, stores and copies to shared memory, by their bits."""
    import triton

    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run(
            [disassembler, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = Counter[int]()
    for words in re.findall(r"\b(?:LDGSTS|LDG|STG)\b((?:\.\w+)*)", sass):
        bits = re.findall(r"\.[US]?(8|16|64|128)\b", words)
        found[int(bits[-1]) if bits else 32] += 1
    return found


def print_accesses() -> None:
    """Print one JSON object: kernel -> bits -> accesses, of each variant that is
    launched at C 768 and 1600.
    """
    runs = ["bf16", "bf16, 1600 channels", "bf16, muon"]
    kernels = compile_for("sm_90", KERNELS.values(), runs).kernels
    print(
        json.dumps(
            {
                name: [accesses(kernel.asm["cubin"]) for kernel in variants]
                for name, variants in kernels.items()
            }
        )
    )


def print_faults(target: str, runs: Iterable[str]) -> None:
    """Print the names of the kernels that multiply, and a line for each of their faults."""
    compiler = compile_for(target, [PRODUCTS], runs)
    print(*compiler.kernels)
    print(*compiler.failures, *faults(target, compiler), sep="\n")


@pytest.fixture(scope="module")
def found():
    """Compile in a separate process, because kernels may run in the interpreter in this one."""
    return json.loads(compiled_elsewhere("-m", "tests.kernels.test_wide_accesses").splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", KERNELS)
def test_bandwidth_bound_kernels_access_16_bytes_at_once(found, launcher):
    """All but numbers of a row or a step, of 4 bytes: at most 8 such accesses in a
    kernel, a seventh of the bits.
    """
    assert found[KERNELS[launcher]]
    for form in found[KERNELS[launcher]]:
        bits = {int(width): int(width) * n for width, n in form.items()}
        assert bits[128] / sum(bits.values()) > 0.85, form
        assert sum(form.values()) - form["128"] <= 8, form


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", RUNS)
def test_products_load_operands_wide_and_ahead_without_tma(target):
    """In these runs; `make compile-all` checks all kernels in all runs for all targets.

    compile_targets.py names AMD's exceptions.
    """
    if TARGETS[target].fails:
        pytest.skip("this Triton compiles no attention for it")
    printed = compiled_elsewhere("-m", "tests.kernels.test_wide_accesses", target, *RUNS[target])
    compiled, *found = printed.splitlines()
    needed = {"_matmul_kernel", "_matmul_dw_kernel", "_attention_bwd_dkdv_kernel"}
    assert needed <= {*compiled.split()}
    assert [line for line in found if line] == []


if __name__ == "__main__":
    if sys.argv[1:]:
        print_faults(sys.argv[1], sys.argv[2:] or ALL_RUNS)
    else:
        print_accesses()
