"""tests/chaos/soak.py: what counts as growth."""

import numpy as np

from tests.chaos import soak


def test_a_slope_beyond_its_error_counts_as_growth(capsys):
    noise = np.random.default_rng(0).standard_normal(90)
    samples = [
        {
            "seconds": float(i),
            "RSS, MiB": 100 + 0.1 * i + noise[i],
            "descriptors": 40.0,
            "threads": 20 + noise[i],
        }
        for i in range(90)
    ]
    assert soak.print_slopes(samples) == 1
    _, memory, descriptors, threads = capsys.readouterr().out.splitlines()
    assert (
        memory.startswith("RSS, MiB")
        and memory.endswith("  GROWS")
        and 300 < float(memory.split()[4]) < 420
    )
    assert (
        descriptors.split() == ["descriptors", "40.0", "40.0", "0.00", "0.00"]
        and "GROWS" not in threads
    )
