"""Kernels for GPUs that are not here: they compile, fit shared memory, do not spill registers, and
access 16 bytes per thread and instruction (as with llm.c's Packed128), read from machine code.

Bandwidth-bound kernels are read in Hopper's SASS, the operands of products in the code of GPUs
without TMA.  `make compile-all` compiles all kernels of all runs for all targets
(compile_targets.py).

python -m tests.kernels.test_wide_accesses   kernel, accesses of global memory by their bits
python -m tests.kernels.test_wide_accesses sm_89 ...  spills and faults of its kernels below
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from gpt2_triton.kernels.table_file import TABLES
from tests.kernels.compile_targets import PRODUCTS, TARGETS, compile_for, faults, multiplying
from tests.support.elsewhere import compiled_elsewhere

KERNELS = {
    "adamw": "_adamw_kernel",
    "embedding_fwd": "_embedding_fwd_kernel",
    "layernorm_fwd": "_layernorm_fwd_kernel",
    "layernorm_bwd": "_layernorm_bwd_kernel",
    "sum_squares": "_sum_squares_kernel",
    "muon_momentum": "_momentum_kernel",
}
ATTENTION = ("_attention_bwd_dkdv_kernel", "_attention_bwd_dq_kernel")
MULTIPLYING = {"_matmul_kernel", "_matmul_dw_kernel", *ATTENTION}
SMALL = tuple(
    f"_{name}_kernel"
    for name in (
        "adamw add_dw_partials attention_fwd best_of_part best_of_parts cache_fill classifier_loss "
        "classifier_target clip_factor column_sums decode_attention decode_embed decode_matvec "
        "embedding_bwd_segments embedding_bwd_split embedding_bwd_wpe embedding_fwd fill keep "
        "layernorm_bwd layernorm_fwd normal_init parameter_stats skip_outliers sum sum_squares "
        "tensor_stats"
    ).split()
)


class Compiled(NamedTuple):
    """What is compiled for a target; bytes that those nearest to its limits may spill."""

    kernels: tuple[str, ...]
    runs: tuple[str, ...]
    spilled: dict[str, int]


# sm_86 and sm_89 have one table, so bf16 is compiled for the former and the rest for the latter.
# sm_90 has maxnreg 128, so that four programs share a multiprocessor: at most 2 registers
# are allowed.  Triton 3.6 spills 16 for sm_120 and 132 for gfx1100, where 3.9 spills none
COMPILED = {
    "sm_80": Compiled((PRODUCTS,), ("bf16", "bf16, recompute"), dict.fromkeys(ATTENTION, 0)),
    "sm_86": Compiled((PRODUCTS,), ("bf16, 1600 channels",), {"_matmul_kernel": 0}),
    "sm_89": Compiled(
        (PRODUCTS,),
        ("fp8", "fp8, qk_norm", "fp8, head", "bf16, llama 8B", "fp32", "decoding"),
        {"_fp8_matmul_kernel": 0},
    ),
    "sm_90": Compiled(ATTENTION, ("bf16",), dict.fromkeys(ATTENTION, 8)),
    "sm_100": Compiled(
        ("_matmul_kernel:dact", "_matmul_kernel:rope"),
        ("bf16", "bf16, llama 8B"),  # of heads of 128
        {"_matmul_kernel": 0},
    ),
    "sm_120": Compiled(ATTENTION, ("bf16",), dict.fromkeys(ATTENTION, 16)),
    "gfx942": Compiled(
        (PRODUCTS, *SMALL),
        ("bf16", "bf16, muon"),
        dict.fromkeys(("_matmul_kernel", *ATTENTION, *SMALL), 0),
    ),
    "gfx1100": Compiled((PRODUCTS,), ("bf16", "bf16, wide heads"), dict.fromkeys(ATTENTION, 132)),
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


def print_compiled(targets: list[str]) -> None:
    """Print one JSON object: for each target bytes that each kernel spills, kernels that multiply
    and are not compiled, and lines of what is wrong.
    """
    found = {}
    for target in targets:
        kernels, runs, _ = COMPILED[target]
        compiler = compile_for(target, kernels, runs)
        spilled = {name: need.spilled for name, need in compiler.needs.items()}
        left_out = sorted(multiplying() - spilled.keys())
        found[target] = spilled, left_out, compiler.failures + faults(target, compiler)
    print(json.dumps(found))


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
@pytest.mark.parametrize(
    "targets",
    [("sm_80", "sm_86", "sm_89"), ("sm_90", "sm_100", "sm_120"), ("gfx942", "gfx1100")],
    ids=str,
)
def test_kernels_fit_and_load_operands_wide_and_ahead_without_tma(targets):
    """In these runs; compile_targets.py names AMD's exceptions."""
    able = [target for target in targets if not TARGETS[target].fails]
    printed = compiled_elsewhere("-m", "tests.kernels.test_wide_accesses", *able)
    found = json.loads(printed.splitlines()[-1])
    for target in able:
        spilled, left_out, wrong = found[target]
        kernels, _, limits = COMPILED[target]
        needed = MULTIPLYING if PRODUCTS in kernels else set()
        assert wrong == [] and needed | limits.keys() <= spilled.keys(), target
        assert target != "sm_89" or left_out == []
        spilling = {name: spilled[name] for name, most in limits.items() if spilled[name] > most}
        assert spilling == {}, target


@pytest.mark.slow
def test_every_portable_kernel_is_compiled():
    """The runs of compile_targets launch them all on gfx950, which has fp8;
    nothing is compiled here.
    """
    program = (
        "from tests.kernels.compile_targets import compile_for; "
        "print(*compile_for('gfx950', ()).launched)"
    )
    printed = compiled_elsewhere("-c", program)
    sources = [path.read_text() for path in TABLES.parent.glob("*.py")]
    kernels = {
        name
        for source in sources
        for name in re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)
    }
    assert len(kernels) > 40 and kernels == set(printed.split())


if __name__ == "__main__":
    if sys.argv[1:]:
        print_compiled(sys.argv[1:])
    else:
        print_accesses()
