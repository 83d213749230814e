"""Sorts the reports of compute-sanitizer's racecheck on the kernels of tests/gpu/sanitize.py:

    compute-sanitizer --tool racecheck --racecheck-report hazard --print-limit 1000000
    --log-file LOG python -m tests.gpu.sanitize 7
    python -m tests.gpu.races LOG ...

Triton starts the warps of a `warp_specialize` partition through a word in shared memory: the first
warps write the number of the partition, and waiting warps read it.  A barrier of all warps lies
between, which racecheck does not see: tests/kernels/test_hopper.py finds it in every kernel's
code.  The read is the only one at the line of the kernel's `def`.  Such reports are counted; any
other is printed, and the exit code is 1.  A log without racecheck's summary is one of a check that
did not finish.  Reports by instruction, --racecheck-report analysis, lack the words' values: they
are refused.

racecheck does not check what mbarriers order.  Of a product with GELU without a wait for its
operands, for a full tile or for an empty one, it reports the same words and nothing else; only
tests/support/gluon_simulator.py finds such a wait missing.
"""

import inspect
import re
import sys
from collections import Counter
from pathlib import Path

from tests.support.gluon_simulator import KERNELS as MODULES

PARTITIONS = 8  # of a kernel at most
REPORT = re.compile(
    r"hazard detected at __shared__ (?P<address>0x[0-9a-f]+) in block.*\n"
    r".*Write Thread .* at (?P<kernel>\w+)\+0x[0-9a-f]+ in (?P<write>\S+)\n"
    r".*Read Thread .* at \w+\+0x[0-9a-f]+ in (?P<read>\S+)\n"
    r".*Current Value : (?P<value>\d+)"
)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")


def entries() -> dict[str, str]:
    """Return "file.py:line" of the `def` of each kernel with partitions, by the kernel's name."""
    found = {}
    for module in MODULES:
        source = inspect.getsource(module)
        for kernel in re.finditer(
            r"^def (_\w+_kernel)\((?:.*\n)+?(?=^@|^def |\Z)", source, re.MULTILINE
        ):
            if "warp_specialize(" in kernel[0]:
                line = source.count("\n", 0, kernel.start()) + 1
                found[kernel[1]] = f"{Path(inspect.getfile(module)).name}:{line}"
    return found


def sort(log: str) -> tuple[Counter[str], list[str]]:
    """Return the number of reports of a dispatch word for each kernel, and a
    line for each other report.
    """
    dispatch: Counter[str] = Counter()
    others, entry = [], entries()
    reports = list(REPORT.finditer(log))
    for r in reports:
        if r["read"] == entry.get(r["kernel"]) and int(r["value"]) < PARTITIONS:
            dispatch[r["kernel"]] += 1
        else:
            others.append(
                f"{r['kernel']}: {r['address']} written in {r['write']}, read in {r['read']}"
            )
    summary = SUMMARY.search(log)
    if summary is None:
        others.append("no summary: racecheck did not finish")
    unread = log.count("hazard detected") - len(reports)
    if not reports and summary is not None:
        unread = int(summary[1])
    if unread:
        others.append(f"{unread} reports in a form that is not known; see --racecheck-report")
    return dispatch, others


def main(logs: list[str]) -> int:
    failed = not logs
    for name in logs:
        dispatch, others = sort(Path(name).read_text(errors="replace"))
        counts = ", ".join(f"{n} of {kernel}'s dispatch word" for kernel, n in dispatch.items())
        head = (
            f"{name}: {len(others)} reports of other memory; {counts or 'none of a dispatch word'}"
        )
        print(head, *others, sep="\n")
        failed |= bool(others)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
