"""benchmarks/losses/pairs.py: which runs are made, what is kept of one, and the
statistics of the report.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.losses import pairs
from gpt2_triton.commands.app import main
from gpt2_triton.data.shards import write_shard
from gpt2_triton.training.run_info import write_run

SERIES = sorted(Path("benchmarks/losses").glob("*.yaml"))
TINY = """
config: configs/quickstart.yaml
options: {train.steps: 5, train.batch_size: 2, train.seq_len: 16, train.total_batch_tokens: 32,
  model.n_layer: 1, model.n_head: 1, model.n_embd: 64, model.block_size: 16, optim.warmup: 2,
  eval.every: 5, eval.tokens: 64, sample.every: 0, checkpoint.every: 0}
seeds: 2
arms:
  one: {}
  other rate: {optim.lr: 2e-3, seeds: 1}
  PyTorch: {program: benchmarks.losses.torch_train, against: other rate, seeds: 1}
  other end: {end.from: 3, end.optim.lr: 2e-3, seeds: 1}
"""


def row(arm, seed, loss, **more):
    figures = dict(train_loss=loss, val_loss=None, steps=12, tokens=12 * 64, ms=2.0)
    return figures | dict(arm=arm, seed=seed, options={}) | more


@pytest.mark.slow
def test_missing_runs_are_trained_and_compared(tmp_path, capsys):
    for name in ("train_000000", "val_000000"):
        write_shard(tmp_path / f"{name}.bin", np.arange(4000).astype(np.uint16) % 250)
    file, out = tmp_path / "tiny.yaml", tmp_path / "r.jsonl"
    file.write_text(TINY)
    series = pairs.read_series(file)
    done = [row(*run, 2.0, options=series.options(*run)) for run in [("one", 1), ("other rate", 0)]]
    out.write_text("".join(json.dumps(each) + "\n" for each in done))
    assert main(pairs.app, [str(file), "--data", str(tmp_path), "--out", str(out)]) == 0
    _, _, *rows = pairs.read_results(out)
    made = [(r["arm"], r["seed"], r["steps"]) for r in rows]
    assert made == [(arm, 0, 5) for arm in ("one", "PyTorch", "other end")]
    assert all(0 < r["val_loss"] < 7 for r in rows)
    one, pytorch, other_end = (r["train_loss"] for r in rows)
    assert 0 < one < 7 and abs(pytorch - one) < 0.02  # the same weights and data
    assert 0 < abs(other_end - one) < 0.1  # the fourth step of five has another rate
    assert {r["data"] for r in rows} == {pairs.data_digest(tmp_path)}
    assert "against other rate |" in capsys.readouterr().out


def test_a_run_that_fails_leaves_no_result(tmp_path, monkeypatch):
    for name in ("train_000000", "val_000000"):
        write_shard(tmp_path / f"{name}.bin", np.arange(40).astype(np.uint16))
    (tmp_path / "tiny.yaml").write_text(TINY)
    out = tmp_path / "r.jsonl"
    monkeypatch.setattr(pairs, "commands", lambda *_: [["-c", "raise OSError"]])
    words = [str(tmp_path / "tiny.yaml"), "--data", str(tmp_path), "--out", str(out)]
    assert main(pairs.app, [*words, "--arm", "one"]) == 1 and not pairs.read_results(out)


def test_a_run_is_its_last_fifth_of_losses_its_last_validation_and_median_time(tmp_path):
    losses = [9.0] * 8 + [2.0, None]
    records = [dict(step=n, loss=x, ms=60 / n, tokens=64 * n) for n, x in enumerate(losses, 1)]
    records += [dict(step=5, val_loss=3.0), dict(step=10, val_loss=2.5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, records), ""]))
    write_run(tmp_path, None, [dict(git=None, device="CPU")])
    found = pairs.figures(tmp_path)
    assert (found["train_loss"], found["val_loss"]) == (2.0, 2.5)
    assert (found["ms"], found["tokens"]) == (11.0, 640)


@pytest.mark.parametrize("file", SERIES, ids=lambda path: path.stem)
def test_each_series_has_valid_keys_and_its_own_results(file):
    series, rows = pairs.read_series(file), pairs.read_results(file.with_suffix(".jsonl"))
    pairs.require_same(series, [r | {"data": ""} for r in rows], "")
    for arm in series.arms:
        series.check(arm)
    assert len(pairs.table(series, rows).splitlines()) == 2 + len({r["arm"] for r in rows})


def test_differences_are_those_of_pairs_on_the_same_data():
    rows = [row("a", seed, loss) for seed, loss in enumerate((2.0, 2.2, 2.1))]
    rows += [row("b", seed, loss) for seed, loss in enumerate((2.03, 2.21))]
    rows += [row("c", 0, 2.5, data="x"), row("d", 0, 2.5, data="y")]
    # t of 1 degree, sd 0.01 sqrt 2, over sqrt 2
    half = 12.706 * math.sqrt(2 * 0.01**2) / math.sqrt(2)
    assert str(pairs.difference(rows, "b", "a", "train_loss")) == f"+0.0200 ± {half:.4f} (2)"
    assert pairs.difference(rows, "b", "a", "val_loss") is None
    assert str(pairs.difference(rows, "c", "a", "train_loss")) == "+0.5000 (1)"
    assert pairs.difference(rows, "c", "d", "train_loss") is None
