"""benchmarks/losses/pairs.py: which runs are made, what is kept of one, and the
statistics of the report.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.losses import pairs
from gpt2_triton.data.shards import write_shard

SERIES = sorted(Path("benchmarks/losses").glob("*.yaml"))
TINY = """
config: configs/quickstart.yaml
options: {train.steps: 5, train.batch_size: 2, train.seq_len: 16, train.total_batch_tokens: 32, \
model.n_layer: 1,
  model.n_head: 1, model.n_embd: 64, model.block_size: 16, optim.warmup: 2, eval.every: 5, \
eval.tokens: 64,
  sample.every: 0, checkpoint.every: 0}
seeds: 2
arms:
  one: {}
  other rate: {optim.lr: 2e-3, seeds: 1}
  PyTorch: {program: benchmarks.losses.torch_train, against: other rate, seeds: 1}
  other end: {end.from: 3, end.optim.lr: 2e-3, seeds: 1}
"""


def row(arm, seed, loss, **more):
    figures = dict(
        train_loss=loss,
        val_loss=None,
        steps=12,
        tokens=12 * 64,
        ms=2.0,
    )
    return figures | dict(arm=arm, seed=seed, options={}) | more


def write_row(folder, arm, seed):
    options = pairs.read_series(folder / "tiny.yaml").options(arm, seed)
    with open(folder / "r.jsonl", "a") as file:
        file.write(json.dumps(row(arm, seed, 2.0, options=options)) + "\n")


@pytest.fixture
def words(tmp_path):
    """The arguments of the tiny series, whose file of results has the run of `one` with seed 1."""
    for name in ("train_000000", "val_000000"):
        write_shard(tmp_path / f"{name}.bin", np.arange(4000).astype(np.uint16) % 250)
    (tmp_path / "tiny.yaml").write_text(TINY)
    write_row(tmp_path, "one", 1)
    return [
        str(tmp_path / "tiny.yaml"),
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "r.jsonl"),
    ]


@pytest.mark.slow
def test_missing_runs_are_trained_and_compared(words, tmp_path, capsys):
    write_row(tmp_path, "other rate", 0)
    assert pairs.main(words) == 0
    _, _, *rows = pairs.read_results(tmp_path / "r.jsonl")
    assert [(r["arm"], r["seed"], r["steps"]) for r in rows] == [
        (a, 0, 5) for a in ("one", "PyTorch", "other end")
    ]
    assert all(0 < r["train_loss"] < 7 and 0 < r["val_loss"] < 7 for r in rows)
    one, pytorch, other_end = (r["train_loss"] for r in rows)
    assert abs(pytorch - one) < 0.02  # the same weights and data
    assert 0 < abs(other_end - one) < 0.1  # the fourth step of five has another rate
    assert {r["data"] for r in rows} == {pairs.data_digest(tmp_path)}
    assert "against other rate |" in capsys.readouterr().out


def test_a_run_that_fails_leaves_no_result(words, tmp_path, capsys):
    before = (tmp_path / "r.jsonl").read_text()
    (tmp_path / "tiny.yaml").write_text(
        TINY.replace("benchmarks.losses.torch_train", "json.tool --none")
    )
    assert pairs.main([*words, "--arm", "PyTorch"]) == 1
    assert capsys.readouterr().err.startswith("PyTorch seed 0: exit code 2\n")
    assert (tmp_path / "r.jsonl").read_text() == before


@pytest.mark.parametrize("file", SERIES, ids=lambda path: path.stem)
def test_each_series_has_valid_keys_and_its_own_results(file, capsys):
    series, rows = pairs.read_series(file), pairs.read_results(file.with_suffix(".jsonl"))
    pairs.require_same(series, [r | {"data": ""} for r in rows], "")
    for arm in series.arms:
        series.check(arm)
    assert pairs.main([str(file), "--out", str(file.with_suffix(".jsonl")), "--report"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len({r["arm"] for r in rows})


def test_differences_are_those_of_pairs_on_the_same_data():
    rows = [row("a", seed, loss) for seed, loss in enumerate((2.0, 2.2, 2.1))]
    rows += [
        row("b", 0, 2.03),
        row("b", 1, 2.21),
        row("c", 0, 2.5, data="x"),
        row("d", 0, 2.5, data="y"),
    ]
    # t of 1 degree, sd 0.01 sqrt 2, over sqrt 2
    half = 12.706 * math.sqrt(2 * 0.01**2) / math.sqrt(2)
    assert str(pairs.difference(rows, "b", "a", "train_loss")) == f"+0.0200 ± {half:.4f} (2)"
    assert pairs.difference(rows, "b", "a", "val_loss") is None
    assert str(pairs.difference(rows, "c", "a", "train_loss")) == "+0.5000 (1)"
    assert pairs.difference(rows, "c", "d", "train_loss") is None
