"""benchmarks/losses/ratio.py: runs of a known law give its ratio, and the intervals cover it as often as they say."""

import json

import numpy as np

from benchmarks.losses import ratio
from benchmarks.losses.ratio import Fit, Run, noise_of, runs_of

E, LAWS = 0.9, {"adamw": (8.2, 0.45), "muon": (5.8, 0.43)}  # E, A and a
POINTS = {("d6", 60): 3, ("d6", 240): 3, ("d12", 60): 3, ("d12", 120): 1, ("d12", 240): 2}  # runs of each optimizer
SD = {"adamw": 0.01, "muon": 0.003}


def loss(name, tokens):
    return E + LAWS[name][0] * tokens ** -LAWS[name][1]


def truth(tokens):
    A, a = LAWS["adamw"]
    return (A / (loss("muon", tokens) - E)) ** (1 / a) / tokens


def runs(seed, noise=SD):
    rng = np.random.default_rng(seed)
    return [
        Run(size, name, tokens, loss(name, tokens) + rng.normal(0, noise[name]), True)
        for (size, tokens), n in POINTS.items() for name in LAWS for _ in range(n)
    ]  # fmt: skip


def fit(found):
    return Fit([run for run in found if run.size == "d12"], {name: noise_of(found, name) for name in LAWS})


def test_runs_with_little_noise_give_the_ratio_of_their_law():
    precise = fit(runs(0, dict.fromkeys(SD, 5e-4)))
    for tokens in (60, 240, 1000, 10_000):
        middle, low, high = precise.ratio(tokens)
        assert low < truth(tokens) < high and high / low < 1.1
        assert abs(middle / truth(tokens) - 1) < 0.02
        assert abs(precise.loss("adamw", tokens) - loss("adamw", tokens)) < 0.01


def test_intervals_cover_the_truth_and_widen_with_the_distance():
    fits = [fit(runs(seed)) for seed in range(40)]
    for tokens in (240, 10_000):
        ends = [one.ratio(tokens)[1:] for one in fits]
        assert 0.85 < np.mean([low < truth(tokens) < high for low, high in ends]) < 1
    near, far = ([np.log(one.ratio(tokens)[2] / one.ratio(tokens)[1]) for one in fits] for tokens in (240, 10_000))
    assert np.median(far) > 2 * np.median(near)


def test_noise_is_pooled_over_sizes_and_belongs_to_an_optimizer():
    found = [Run("d6", "muon", 60, x, True) for x in (1.0, 1.2)] + [Run("d12", "muon", 60, x, True) for x in (5, 5, 5)]
    sd, freedom = noise_of([*found, Run("d6", "adamw", 60, 9.0, True)], "muon")
    assert freedom == 3 and abs(sd - (0.02 / 3) ** 0.5) < 1e-12


def test_the_command_reports_every_size_and_keeps_l1_out_of_the_fit(tmp_path, capsys):
    rows = [dict(arm=f"{r.size} {r.optimizer} {r.tokens}M", tokens=r.tokens * 1e6, val_loss=r.loss) for r in runs(1)]
    rows += [dict(arm=f"L1 {name} 1B", tokens=1e9, val_loss=9.0) for name in LAWS]
    rows += [dict(arm="L1 muon, 77%", tokens=7e8, val_loss=2.0), dict(arm="L2 muon 240M, bf16", tokens=1, val_loss=2.0)]
    assert [run.fitted for run in runs_of(rows)] == [True] * 24 + [False] * 2
    file = tmp_path / "scale.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ratio.main([str(file)])
    out = capsys.readouterr().out
    budgets = {"d6": ("60", "240", "10,000"), "d12": ("60", "120", "240", "1,000", "10,000")}
    lines = [line.split(" | ")[:2] for line in out.splitlines() if line.startswith("| d")]
    assert lines == [[f"| {size}", tokens] for size, all in budgets.items() for tokens in all]
    assert "d12 muon 1,000: 9.0000; the fit has 1." in out and "| 1,000 | 9.0000 | 9.0000 | +0.0000 |" in out
