"""Muon's polynomials against their derivation, and in float64 on the singular values that they are for."""

import math

import numpy as np
import pytest

from gpt2_triton.model.muon import LOWEST, POLAR_EXPRESS


def best_quintic(low: float, high: float) -> np.ndarray:
    """Return a, b, c of the odd quintic with the least largest distance from 1 on [low, high] (Remez's algorithm).

    The distance takes its largest value, with alternating sign, at both ends and at the two extrema between them.
    """
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    for _ in range(60):
        s = np.array([low, *inner, high])
        a, b, c, _ = np.linalg.solve(np.stack([s, s**3, s**5, [1, -1, 1, -1]], 1), np.ones(4))
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * math.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
    return np.array([a, b, c])


def value(row, s):
    a, b, c = row
    return a * s + b * s**3 + c * s**5


def test_polynomials_are_those_of_polar_express():
    """Each is the best on the interval that remains, but for one that does not shrink below 0.0241 of its upper end,
    from where its distances at the ends differ and it is scaled to balance them.  All but the last take s / 1.01.
    """
    low, high, rows = LOWEST, 1.0, []
    for _ in POLAR_EXPRESS:
        row = best_quintic(max(low, 0.02407327424182761 * high), high)
        row *= 2 / (value(row, low) + value(row, high))
        rows.append(row)
        low = value(row, low)
        high = 2 - low
    safe = [row / 1.01 ** np.array([1, 3, 5]) for row in rows[:-1]] + rows[-1:]
    np.testing.assert_allclose(POLAR_EXPRESS, safe, rtol=1e-9)


def test_singular_values_from_a_thousandth_to_one_become_nearly_one():
    s = np.geomspace(1e-3, 1, 100_001) / 1.02
    for row in POLAR_EXPRESS:
        s = value(row, s)
    assert 0.85 < s.min() and s.max() < 1.15


@pytest.mark.parametrize("s", [0.0, 1e-6])
def test_smaller_singular_values_grow_but_do_not_pass_one(s):
    got = s
    for row in POLAR_EXPRESS:
        got = value(row, got)
    assert s * 800 <= got <= 1
