"""tests/gpu/races.py: what it counts as Triton's dispatch and what it reports.  Needs no GPU."""

import pytest

from tests.gpu import races

CLEAN = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
BY_INSTRUCTION = (
    "========= Error: Race reported between Read access at _matmul_kernel+0x120 in matmul.py:67\n"
    "=========     and Write access at _matmul_kernel+0x11c0 in matmul.py:67 [1 hazards]\n"
)


def report(kernel, read, value=2):
    return (
        "========= Error: Potential RAW hazard detected at __shared__ 0x344ab in block (5,0,0) :\n"
        f"=========     Write Thread (31,0,0) at {kernel}+0xf60 in matmul.py:58\n"
        f"=========     Read Thread (352,0,0) at {kernel}+0x120 in {read}\n"
        f"=========     Current Value : {value}\n"
    )


def test_the_line_of_each_kernel_with_partitions_is_known():
    entries = races.entries()
    assert {"_matmul_kernel", "_dw_kernel", "_classifier_kernel", "_fp8_kernel"} <= entries.keys()
    for kernel, place in entries.items():
        file, _, line = place.partition(":")
        module = next(m for m in races.MODULES if m.__file__.endswith(f"/{file}"))
        with open(module.__file__) as source:
            assert source.readlines()[int(line) - 1].startswith(f"def {kernel}(")


@pytest.mark.parametrize(
    "log, dispatch, others",
    [
        (CLEAN, 0, 0),
        (BY_INSTRUCTION + SUMMARY, 0, 1),
        (report("_matmul_kernel", "ENTRY") * 3 + SUMMARY, 3, 0),
        (report("_matmul_kernel", "ENTRY"), 1, 1),  # without a summary
        (report("_matmul_kernel", "matmul.py:1") + SUMMARY, 0, 1),
        (report("_matmul_kernel", "ENTRY", value=200) + SUMMARY, 0, 1),
        (report("_attention_kernel", "attention.py:9") + SUMMARY, 0, 1),
        ("========= Error: WAW hazard detected at somewhere\n" + SUMMARY, 0, 1),
    ],
)
def test_only_reports_of_the_dispatch_word_are_excused(log, dispatch, others, tmp_path):
    log = log.replace("ENTRY", races.entries()["_matmul_kernel"])
    counted, rest = races.sort(log)
    assert (sum(counted.values()), len(rest)) == (dispatch, others)
    path = tmp_path / "log"
    path.write_text(log)
    assert races.main([str(path)]) == bool(others)
