"""benchmarks/losses/ratio.py: runs of a known law give its ratio, and the intervals
cover it as often as they say.
"""

import numpy as np
import pytest

from benchmarks.losses import ratio
from benchmarks.losses.ratio import Fit, Run, noise_of

E, LAWS = 0.9, {"adamw": (8.2, 0.45), "muon": (5.8, 0.43)}  # E, A and a
RUNS = {"d6": {60: 8, 120: 1, 240: 3}, "d12": {60: 3, 120: 1, 240: 2}}  # of each budget
SD = {"adamw": {"d6": 0.003, "d12": 0.02}, "muon": {"d6": 0.003, "d12": 0.003}}


def loss(name, tokens):
    return E + LAWS[name][0] * tokens ** -LAWS[name][1]


def truth(tokens):
    A, a = LAWS["adamw"]
    return (A / (loss("muon", tokens) - E)) ** (1 / a) / tokens


def runs(seed, scale=1):
    rng = np.random.default_rng(seed)
    return [
        Run(size, name, tokens, loss(name, tokens) + rng.normal(0, scale * SD[name][size]), True)
        for size, budgets in RUNS.items() for tokens, n in budgets.items()
        for name in LAWS for _ in range(n)
    ]  # fmt: skip


def fit(found):
    large = [run for run in found if run.size == "d12"]
    return Fit(large, {name: noise_of(found, name, "d12") for name in LAWS})


def test_runs_with_little_noise_give_the_ratio_of_their_law():
    precise = fit(runs(0, 0.02))
    for tokens in (60, 240, 1000, 10_000):
        middle, low, high = precise.ratio(tokens)
        assert low < truth(tokens) < high and high / low < 1.1
        assert abs(middle / truth(tokens) - 1) < 0.02
        assert abs(precise.loss("adamw", tokens) - loss("adamw", tokens)) < 0.01


def test_intervals_cover_the_truth_and_widen_with_the_distance():
    fits, widths = [fit(runs(seed)) for seed in range(50)], []
    for tokens in (240, 10_000):
        low, high = np.transpose([one.ratio(tokens)[1:] for one in fits])
        assert 0.9 < np.mean((low < truth(tokens)) & (truth(tokens) < high)) < 1
        widths.append(np.median(np.log(high / low)))
    assert widths[1] > 2 * widths[0]


def test_noise_belongs_to_a_size_and_is_the_largest_for_a_size_without_seeds():
    losses = {"d6": (1.0, 1.2), "d8": (3.0,), "d12": (5.0, 5.0, 5.3)}
    found = [Run(size, "muon", 60, x, True) for size, all in losses.items() for x in all]
    noise = [noise_of(found, "muon", size) for size in losses]
    assert [(one.freedom, one.size) for one in noise] == [(1, "d6"), (2, "d12"), (2, "d12")]
    assert np.allclose([one.sd for one in noise], [0.02**0.5, 0.03**0.5, 0.03**0.5])


def test_l1_has_the_ratio_at_which_the_line_through_muons_runs_meets_adamws_loss():
    runs = [("adamw", 1000), ("muon", 770), ("muon", 1000)]
    l1 = [Run("d12", of, D, loss(of, D), False) for of, D in runs]
    noise = {name: ratio.Noise(0.003, 3, "d12") for name in LAWS}
    middle, low, high = ratio.measured(l1, noise)
    A, a = LAWS["muon"]
    expected = 1000 / (A / (loss("adamw", 1000) - E)) ** (1 / a)
    assert abs(middle / expected - 1) < 0.03 and low < middle < high
    moved = []  # the ratio's logarithm, by a run's noise
    for run in l1:
        others = [other for other in l1 if other is not run]
        near, *_ = ratio.measured([*others, run._replace(loss=run.loss + 0.003)], noise)
        moved.append(np.log(near / middle))
    assert np.log(high / middle) == pytest.approx(3.182 * np.hypot.reduce(moved), rel=0.05)
