"""benchmarks/losses/ratio.py: runs of a known law give its ratio, and the intervals
cover it as often as they say.
"""

import json

import numpy as np

from benchmarks.losses import ratio
from benchmarks.losses.ratio import Fit, Run, noise_of, runs_of

E, LAWS = 0.9, {"adamw": (8.2, 0.45), "muon": (5.8, 0.43)}  # E, A and a
# runs
POINTS = {
    ("d6", 60): 8,
    ("d6", 120): 1,
    ("d6", 240): 3,
    ("d12", 60): 3,
    ("d12", 120): 1,
    ("d12", 240): 2,
}
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
        for (size, tokens), n in POINTS.items() for name in LAWS for _ in range(n)
    ]  # fmt: skip


def fit(found):
    return Fit(
        [run for run in found if run.size == "d12"],
        {name: noise_of(found, name, "d12") for name in LAWS},
    )


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
    noise = {size: noise_of(found, "muon", size) for size in losses}
    assert [(one.freedom, one.size) for one in noise.values()] == [
        (1, "d6"),
        (2, "d12"),
        (2, "d12"),
    ]
    assert np.allclose([one.sd for one in noise.values()], [0.02**0.5, 0.03**0.5, 0.03**0.5])
    assert noise_of(found, "adamw", "d6") is None


def test_l1_has_the_ratio_at_which_the_line_through_muons_runs_meets_adamws_loss():
    l1 = [
        Run("d12", of, D, loss(of, D), False)
        for of, D in (("adamw", 1000), ("muon", 770), ("muon", 1000))
    ]
    noise = {name: ratio.Noise(0.003, 3, "d12") for name in LAWS}
    middle, low, high = ratio.measured(l1, noise)
    A, a = LAWS["muon"]
    assert (
        abs(middle / (1000 / (A / (loss("adamw", 1000) - E)) ** (1 / a)) - 1) < 0.03
        and low < middle < high
    )
    assert ratio.measured(l1[:2], noise) is None


def test_the_command_reports_every_size_and_keeps_l1_out_of_the_fit(tmp_path, capsys):
    rows = [
        dict(arm=f"{r.size} {r.optimizer} {r.tokens}M", tokens=r.tokens * 1e6, val_loss=r.loss)
        for r in runs(1)
    ]
    rows += [dict(arm=f"L1 {name} 1B", tokens=1e9, val_loss=9.0) for name in LAWS]
    rows += [
        dict(arm="L1 muon, 77%", tokens=7e8, val_loss=9.1),
        dict(arm="L2 muon 240M, bf16", tokens=1, val_loss=2.0),
    ]
    assert [run.fitted for run in runs_of(rows)] == [True] * 36 + [False] * 3
    file = tmp_path / "scale.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ratio.main([str(file)])
    out = capsys.readouterr().out
    budgets = {
        "d6": ("60", "120", "240", "10,000"),
        "d12": ("60", "120", "240", "700", "1,000", "10,000"),
    }
    lines = [line.split(" | ")[:2] for line in out.splitlines() if line.startswith("| d")]
    assert lines == [[f"| {size}", tokens] for size, all in budgets.items() for tokens in all]
    assert (
        "d12 muon 1,000: 9.0000; the fit has 1." in out
        and "| 1,000 | 9.0000 | 9.0000 | +0.0000 | 1.00 |" in out
    )
