"""Losses on the pages are those of the results in benchmarks/losses/."""

import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.series_report import student_t

ROOT = Path(__file__).parents[2]
README, TRAINING = ROOT / "README.md", ROOT / "docs" / "guide" / "training.md"
RECIPES = ROOT / "docs" / "guide" / "recipes.md"
MUON = ROOT / "docs" / "engineering" / "muon.md"


def losses(series, key="val_loss"):
    """Return the losses of a series: by arm, then by seed."""
    found = {}
    for line in (ROOT / "benchmarks" / "losses" / f"{series}.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["arm"], {})[row["seed"]] = row[key]
    return found


def difference(arms, arm, other):
    """Return the mean difference of the pairs of two arms, and half of its 95% interval."""
    pairs = [arms[arm][seed] - arms[other][seed] for seed in arms[arm].keys() & arms[other].keys()]
    half = student_t(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return statistics.fmean(pairs), half


def tokens_for(loss, arms, less, more, arm="best muon, "):
    """Return the fraction of the steps with which Muon ends at this loss, between two fractions in percent."""
    low, high = (statistics.fmean(arms[f"{arm}{percent}%"].values()) for percent in (more, less))
    share = (high - loss) / (high - low)
    assert 0 <= share <= 1
    return less / 100 * (more / less) ** share


def test_differences_of_fp8_at_124m_and_their_price_are_those_of_the_pages():
    arms = losses("fp8_d12")
    mean, half = difference(arms, "fp8", "bf16")
    slope = difference(arms, "bf16 80%", "bf16")[0] / math.log(1 / 0.8)
    low, high = (100 * -math.expm1(-end / slope) for end in (mean - half, mean + half))
    assert f"an interval from {low:.1f}% to {high:.1f}%" in (ROOT / "docs" / "engineering" / "fp8.md").read_text()
    with_muon = difference(arms, "muon, fp8", "muon")
    for page in (README.read_text(), TRAINING.read_text()):
        assert f"with Muon {with_muon[0]:+.3f} ± {with_muon[1]:.3f} (four pairs" in page
        assert f"with AdamW {mean:+.3f} ± {half:.3f} ({len(arms['fp8'].keys() & arms['bf16'])} pairs)" in page
    mean, half = difference(arms, "muon, fp8, logits too", "muon")
    assert f"with the logits in fp8 too {mean:+.3f} ± {half:.3f}" in README.read_text()


@pytest.mark.parametrize("row, key", [("training loss, last fifth of the steps", "train_loss"),
                                      ("validation, the weights in bf16", "val_loss")])  # fmt: skip
def test_table_of_fp8_with_adamw_is_that_of_the_runs(row, key):
    arms = losses("fp8_d12", key)
    pairs = arms["fp8"].keys() & arms["bf16"]
    means = [statistics.fmean(arms[arm][seed] for seed in pairs) for arm in ("bf16", "fp8")]
    mean, half = difference(arms, "fp8", "bf16")
    cells = f"| {row} | {means[0]:.4f} | {means[1]:.4f} | {mean:+.4f} ± {half:.4f} |"
    page = (ROOT / "docs" / "engineering" / "fp8.md").read_text()
    assert cells in page
    mean, half = difference(arms, "bf16, v in bf16", "bf16")
    assert f"{mean:+.3f} ± {half:.3f} in {row.split()[0].removesuffix(',')}" in page


@pytest.mark.parametrize("arm, keys", [("muon, fp8", ("train_loss", "val_loss", "ms")),
                                       ("muon, fp8, logits too", ("train_loss", "val_loss"))])  # fmt: skip
def test_table_of_fp8_with_muon_is_that_of_the_runs(arm, keys):
    page = (ROOT / "docs" / "engineering" / "fp8.md").read_text()
    for key in keys:
        arms, digits = losses("fp8_d12", key), 1 if key == "ms" else 4
        seeds = sorted(arms[arm])
        means = [statistics.fmean(arms[name][seed] for seed in seeds) for name in ("muon", arm)]
        cells = " | ".join(f"{mean:.{digits}f}" for mean in means)
        if key != "ms":
            mean, half = difference(arms, arm, "muon")
            pairs = ", ".join(f"{arms[arm][seed] - arms['muon'][seed]:+.4f}" for seed in seeds)
            cells += f" | {mean:+.4f} ± {half:.4f} | {pairs} |"
        assert f"| {cells}" in page, cells


def test_difference_of_fp8_at_1558m_is_that_of_the_pages():
    mean, half = difference(losses("fp8_d48"), "fp8, lr / 8", "bf16, lr / 8")
    ms = [statistics.fmean(losses("fp8_d48", "ms")[arm].values()) for arm in ("fp8, lr / 8", "bf16, lr / 8")]
    for page in (README.read_text(), TRAINING.read_text()):
        assert f"at 1558M {mean:+.2f} ± {half:.2f} (three pairs" in page
        assert f"and {100 - 100 * ms[0] / ms[1]:.0f}% at 1558M" in page


def test_table_of_small_steps_at_1558m_is_that_of_the_runs():
    page = (ROOT / "docs" / "engineering" / "fp8.md").read_text()
    for key in ("curve", "val_loss"):
        arms = losses("fp8_d48", key)
        if key == "curve":  # of means of 2 steps
            arms = {
                arm: {seed: statistics.fmean(curve[-25:]) for seed, curve in runs.items()} for arm, runs in arms.items()
            }
        pair = ("bf16, lr / 8", "fp8, lr / 8")
        means = " | ".join(f"{statistics.fmean(arms[arm].values()):.3f}" for arm in pair)
        mean, half = difference(arms, pair[1], pair[0])
        pairs = ", ".join(f"{arms[pair[1]][seed] - arms[pair[0]][seed]:+.3f}" for seed in sorted(arms[pair[0]]))
        assert f"| {means} | {mean:+.3f} ± {half:.3f} | {pairs} |" in page


CORPUS = {"3cac9e6d11f3f237": 172_122_635}  # its tokens to train on, as benchmarks.corpus printed them


@pytest.mark.parametrize("arm", losses("minutes_d12"))
def test_table_of_eight_minutes_is_that_of_the_runs(arm):
    page = (ROOT / "docs" / "engineering" / "fp8.md").read_text()
    steps, ms, tokens, train, val, data = (
        losses("minutes_d12", key)[arm][0] for key in ("steps", "ms", "tokens", "train_loss", "val_loss", "data")
    )
    cells = [arm, f"{steps * ms / 60e3:.1f}", f"{steps:,}", f"{tokens / 1e6:.0f}M", f"{tokens / CORPUS[data]:.1f}"]
    cells += [f"{ms:.1f}", f"{train:.3f}", f"{val:.3f}"]
    assert f"| {' | '.join(cells)} |" in page.replace("*", "")


def test_ratio_of_tokens_of_muon_is_that_of_the_pages():
    arms = losses("muon_d12")
    most = 1 / tokens_for(statistics.fmean(arms["best adamw"].values()), arms, 40, 50)
    small = "best adamw, half the batch"
    in_small_steps = min(arms[arm][0] for arm in (small, f"{small}, 0.55e-3", f"{small}, 1.5e-3"))
    least = 1 / tokens_for(in_small_steps, arms, 40, 50, "best muon, half the batch, ")
    assert f"{least:.2f} times as many" in MUON.read_text()
    for page, words in ((README, "{} in smaller steps"), (TRAINING, "in smaller steps {} times"),
                        (MUON, "in smaller steps {} times"), (RECIPES, "{} in steps of 65,536 tokens")):  # fmt: skip
        assert words.format(f"{least:.1f}") in page.read_text(), page
    in_large_steps = 1 / tokens_for(in_small_steps, arms, 60, 80)
    assert f"a ratio of {in_large_steps:.2f}" in MUON.read_text()
    assert f"{most:.2f} times for the means" in MUON.read_text()


def test_interval_of_muons_ratio_of_tokens_is_that_of_the_runs():
    """Each seed's ratio lies between its own two shorter schedules that end on either side of AdamW's loss."""
    arms, ratios = losses("muon_d12"), []
    for seed, loss in sorted(arms["best adamw"].items()):
        ended = sorted(
            (value[seed], steps[seed])
            for arm, value in arms.items()
            if arm.removeprefix("best muon, ") in ("35%", "40%", "50%", "60%") and seed in value
            for steps in [losses("muon_d12", "steps")[arm]]
        )
        (low, more), (high, less) = next(pair for pair in itertools.pairwise(ended) if pair[0][0] <= loss <= pair[1][0])
        ratios.append(450 / (less * (more / less) ** ((high - loss) / (high - low))))
    half = student_t(len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    words = ", ".join(f"{ratio:.2f}" for ratio in ratios[:-1])
    told = (
        f"{words} and {ratios[-1]:.2f} times as many for the three seeds, {statistics.fmean(ratios):.2f} ± {half:.2f}"
    )
    assert told in MUON.read_text()
    ratio = f"{statistics.fmean(ratios):.1f} ± {half:.1f}"
    assert all(f"{ratio} times as many tokens" in page.read_text() for page in (README, TRAINING, MUON))
    assert f"{ratio} in steps of 131,072" in RECIPES.read_text()


SHORTER = {  # rows of a table, and their arms
    "AdamW": "best adamw",
    "Muon, all steps": "best muon",
    "AdamW, 900 steps of 65,536": "best adamw, half the batch",
    "Muon, 900 steps of 65,536": "best muon, half the batch",
    "Muon, 540 steps of 65,536": "best muon, half the batch, 60%",
    "Muon, 450 steps of 65,536": "best muon, half the batch, 50%",
    "Muon, 360 steps of 65,536": "best muon, half the batch, 40%",
    "AdamW, `optim.embed_lr` 1": "best adamw, embeddings at its rate",
    "AdamW, 900 steps of 65,536, 0.55e-3": "best adamw, half the batch, 0.55e-3",
    "AdamW, 900 steps of 65,536, 1.5e-3": "best adamw, half the batch, 1.5e-3",
} | {f"Muon, {percent}%": f"best muon, {percent}%" for percent in (80, 60, 50, 40, 35)}


@pytest.mark.parametrize("row", SHORTER)
def test_losses_of_the_best_settings_are_those_of_the_runs(row):
    cells = re.search(rf"^\| {row} \| (\d) \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \|", MUON.read_text(), re.M)
    runs = [losses("muon_d12", key)[SHORTER[row]].values() for key in ("train_loss", "val_loss")]
    assert [*cells.groups()] == [str(len(runs[0])), *(f"{statistics.fmean(values):.3f}" for values in runs)]


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
@pytest.mark.parametrize("decay", ["0.1", "0.5"])
def test_cells_of_the_learning_rates_are_those_of_the_runs(name, decay):
    page, train, val = MUON.read_text(), losses("muon_d12", "train_loss"), losses("muon_d12")
    rates = re.search(r"^\| learning rate \|(.*)\|$", page, re.M)[1].replace(" ", "").split("|")
    cells = re.search(rf"^\| {name}, decay {decay} \|(.*)\|$", page, re.M)[1].replace("*", "").split("|")
    for rate, cell in zip(rates, cells, strict=True):
        arm = f"{name.lower()} {rate}, decay {decay}"
        expected = [arms[arm][0] for arms in (train, val)] if arm in val else []
        assert [float(word) for word in cell.split(",") if word.strip()] == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("arm", losses("muon_d48"))
def test_losses_at_1558m_are_those_of_the_runs(arm):
    name = {"adamw": "AdamW", "muon": "Muon"}[arm.split()[0]]
    train, val, ms = (losses("muon_d48", key)[arm][0] for key in ("train_loss", "val_loss", "ms"))
    assert f"| {name}, {arm.split()[1]} | {train:.3f} | {val:.3f} | {ms:.1f} |" in MUON.read_text()


LEVERS = {  # rows of a table, and their arms
    "decays a weight only if the update moves it towards 0 too": "cautious decay",
    "decay times the learning rate's share of its maximum": "decay by schedule",
    "`attproj` and `fcproj` begin at 0": "residual at zero",
    "training sequences begin at documents": "rows begin at documents",
    "half a batch in the first half of 360 steps": "half a batch in half of the steps",
}


@pytest.mark.parametrize("row", LEVERS)
def test_differences_of_small_changes_are_those_of_the_runs(row):
    arm, val = LEVERS[row], losses("levers_d12")
    cells = []
    for arms in (losses("levers_d12", "train_loss"), val):
        mean, half = difference(arms, arm, "plain")
        cells.append(f"{mean:+.3f} ± {half:.3f}")
    if arm == "rows begin at documents":  # the training losses are of other rows
        cells[0] = "(other rows)"
    cells.append(", ".join(f"{val[arm][seed] - val['plain'][seed]:+.3f}" for seed in sorted(val[arm])))
    assert len(val[arm]) == 5 and f"| {row} | {' | '.join(cells)} |" in MUON.read_text()
