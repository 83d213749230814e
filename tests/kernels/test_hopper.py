"""The kernels of kernels/hopper/ compile for sm_90 without a GPU, fit its shared
memory and spill no registers, as the launches of whole runs specialise them.

    python -m tests.kernels.test_hopper

compiles them and prints what the test below reads.  Their results are tested in
test_hopper_simulated.py and test_hopper_attention.py without a GPU, and on one in the tests of the
operations.
"""

import json
import re
from importlib.metadata import version

import pytest

from tests.kernels.compile_targets import HOPPER_RUNS, compile_for
from tests.support.elsewhere import compiled_elsewhere
from tests.support.gluon_simulator import KERNELS

RUNS = ("bf16", "bf16, recompute", "bf16, llama", "bf16, qk_norm", *HOPPER_RUNS)
RUNS += ("fp8", "fp8, llama", "fp8, qk_norm", "fp8, head")
SHARED = 228 * 1024  # bytes of a multiprocessor, of which 1 KB of each program is CUDA's
# programs that share one; those of other kernels do not
TOGETHER = {"_attention_fwd_kernel": 5, "_attention_dq_kernel": 4, "_attention_dkdv_kernel": 3}
# known faults by version of Triton, in bytes: GELU in fp8, and Llama's product that adds
SPILLS = {"3.8": [("_fp8_gelu_kernel", "4")], "3.9": [("_fp8_kernel", "16")]}
WITHOUT_PARTITIONS = {
    *TOGETHER,
    *("_cast_weights_kernel", "_classifier_lns_kernel", "_swiglu_kernel", "_transpose_kernel"),
}


def dispatch(ptx: str) -> str:
    """Count what starts partitions: reads of shared memory at a kernel's own line, those after a
    barrier of all warps, writes, and writes before such a barrier.  races.py relies on it.
    """
    barrier = r"barrier\.sync\s+1;\n"
    parts = re.split(r"^\s*\.loc\s+", ptx, flags=re.MULTILINE)
    own = [part for part in parts if not re.match(r".*(@\[|inlined_at)", part)]
    reads = sum(part.count("ld.shared") for part in own)
    after = re.findall(rf"{barrier}(?:\s+(?:mov|add)\..*\n)*\s+ld\.shared\.[bu]8", ptx)
    write = r"st\.shared(?:\.v\d)?\.b\d+\s+\[global_smem\+\d+\], [{}, \d]+;\n"
    writes = len(re.findall(write, ptx))
    before = len(re.findall(rf"{write}\s+{barrier}", ptx))
    return f"{reads} reads, {len(after)} after a barrier; {writes} writes, {before} before"


def barriers(ptx: str) -> tuple[int, int, int]:
    """Return how many barriers are made, in how many places, and how many are invalidated."""
    places = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    made = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)
    return len(made), len({places.get(register) for register in made}), ptx.count("mbarrier.inval")


def print_kernels() -> None:
    """Print failures, a list for each kernel: its name, bytes of shared memory, barriers and
    `dispatch`; then ptxas' log.
    """
    compiler = compile_for("sm_90", runs=RUNS, hopper=True)
    found = [
        (name, kernel.metadata.shared, barriers(kernel.asm["ptx"]), dispatch(kernel.asm["ptx"]))
        for name, kernels in compiler.kernels.items()
        for kernel in kernels
    ]
    print(json.dumps((compiler.failures, found, compiler.log)))


DISPATCH = "1 reads, 1 after a barrier; 2 writes, 2 before"  # what `dispatch` returns
# of a kernel at line 67, with a function at line 88 of another file
PTX = """
    .loc 1 67 0 // matmul.py:67
    st.shared.b32 \t[global_smem+8], 33619968;
    barrier.sync \t1;
    .loc 1 67 0 // matmul.py:67
    barrier.sync \t1;
    add.s32 \t%r3, %r1, %r2;
    ld.shared.b8 \t%r4, [%r3+8];
    .loc 6 88 42 // activation.py:88:42 @[ matmul.py:67 ]
    ld.shared.v4.b32 \t{%r8, %r7, %r6, %r5}, [%r12+98304];
    .loc 1 80 4 // matmul.py:80:4
    st.shared.b32 \t[global_smem+8], 50529027;
    barrier.sync \t1;
"""


def test_a_start_of_partitions_without_a_barrier_is_found():
    assert dispatch(PTX) == DISPATCH
    first, *others = PTX.split("    barrier.sync \t1;\n")
    assert len(others) == 3
    for i in range(3):
        joints = ["" if i == n else "    barrier.sync \t1;\n" for n in range(3)]
        assert dispatch(first + "".join(map(str.__add__, joints, others))) != DISPATCH
    assert dispatch(PTX.replace("88:42 @[ matmul.py:67 ]", "88:42")) != DISPATCH


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_compile_for_sm90_without_spills_and_fit_shared_memory():
    """Compiled in another process: in this one the kernels may belong to the interpreter.  A
    kernel without partitions invalidates its barriers; one with partitions reads at its own line
    their number.
    """
    printed = compiled_elsewhere("-m", "tests.kernels.test_hopper")
    failures, found, log = json.loads(printed.splitlines()[-1])
    kernels = {name for module in KERNELS for name in vars(module) if name.endswith("_kernel")}
    assert failures == [] and {name for name, *_ in found} == kernels
    for name, shared, (made, places, ended), started in found:
        assert shared <= SHARED // TOGETHER.get(name, 1) - 1024, name
        alone = name in WITHOUT_PARTITIONS
        assert made == places > 0 and ended == (made if alone else 0), name
        assert alone or started == DISPATCH, name
    spilled = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL)
    assert len(spilled) == len(found)
    known = SPILLS.get(version("triton")[:3], [])
    assert [each for each in spilled if each[1] != "0"] == known, log
    assert "C75" not in log and "C76" not in log, log  # C75xx: ptxas serialises wgmma


if __name__ == "__main__":
    print_kernels()
