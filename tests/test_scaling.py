"""The arithmetic of communication: the model of docs/scaling.md, and what benchmarks.overlap makes of a trace."""

from pathlib import Path

import pytest

from benchmarks import overlap, scaling

DOCUMENT = Path(__file__).parents[1] / "docs" / "scaling.md"


def test_the_committed_tables_are_the_generated_ones():
    """If not: python -m benchmarks.scaling, and its output into docs/scaling.md."""
    assert scaling.report(300e9, 3e-6) in DOCUMENT.read_text()


def test_a_transfer_takes_bytes_and_hops():
    assert scaling.seconds(1e9, 4, 4, 100e9, 0) == pytest.approx(0.03)  # 3/4 of 4 GB at 100 GB/s
    assert scaling.seconds(0, 4, 5, 1e9, 1e-6) == pytest.approx(4e-6)


def test_what_is_hidden_costs_nothing():
    """With fast links only the last layer's gradients and the embedding's parameters are left."""
    size = scaling.SIZES[0]
    compute, _, exposed = scaling.step(size, size.batch, 8, 300e9, 0)
    assert exposed == pytest.approx(7 / 8 * (4 * size.layer + 2 * size.embed) / 300e9) and exposed < compute / 100
    assert scaling.step(size, size.batch, 8, 1e9, 0)[2] > compute  # and with slow ones everything shows


def event(name, start, duration):
    return {"cat": "kernel", "name": name, "ts": start * 1e3, "dur": duration * 1e3}


def test_the_exposed_part_of_a_collective_is_what_no_kernel_runs_beside():
    scatter = "ncclDevKernel_ReduceScatter(a)"
    kernels = [("matmul", 0, 4), ("matmul", 3, 3), ("matmul", 8, 2), (scatter, 2, 7), (scatter, 9, 1)]
    trace = {"traceEvents": [*(event(*k) for k in kernels), {"cat": "cpu_op", "name": "x", "ts": 0, "dur": 9e9}]}
    lines = overlap.summary(trace, 1).splitlines()
    assert lines[1].split() == ["ncclDevKernel_ReduceScatter", "2", "8.000", "2.000"]
    assert lines[2] == "a step takes 10.000 ms, of which kernels that compute 8.000 ms"
