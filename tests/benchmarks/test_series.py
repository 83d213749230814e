"""benchmarks/series.py: which runs are made, what is kept of one, and the statistics of the report."""

import json
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import series, series_file, series_report
from benchmarks.series_file import Run, Series
from benchmarks.series_results import read_results
from benchmarks.series_runs import Queue
from gpt2_triton.config.load import load_config
from gpt2_triton.data.shards import write_shard

TINY = """
config: configs/quickstart.yaml
options:
  train.steps: 5
  train.batch_size: 2
  train.seq_len: 16
  train.total_batch_tokens: 32
  model.n_layer: 1
  model.n_head: 1
  model.n_embd: 64
  model.block_size: 16
  optim.warmup: 2
  eval.every: 5
  eval.tokens: 64
  sample.every: 0
  checkpoint.every: 0
seeds: 2
arms:
  one: {}
  other rate: {optim.lr: 2e-3, seeds: 1, minutes: 1}
"""


def row(arm, seed, loss, val=None, **more):
    curve = dict(curve=[3.0, 2.0, loss], stride=4, steps=12, tokens=12 * 64, ms=2.0, seconds=60.0)
    return curve | dict(arm=arm, seed=seed, train_loss=loss, val_loss=val) | more


@pytest.fixture
def tiny(tmp_path) -> Series:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return series_file.read_series(tmp_path / "tiny.yaml")


def test_runs_go_by_seed_then_arm_and_share_a_seed(tiny):
    assert [(run.arm, run.seed) for run in tiny.runs] == [("one", 0), ("other rate", 0), ("one", 1)]
    first, other, second = tiny.runs
    assert first.options | {"optim.lr": "2e-3"} == other.options and other.minutes == 1
    assert {key for key in first.options if first.options[key] != second.options[key]} == {"train.seed", "data.seed"}


def test_a_wrong_file_is_one_line(tmp_path, capsys):
    (tmp_path / "wrong.yaml").write_text("arms: {a: {}}\nseed: 2\nconfig: x\n")
    with pytest.raises(SystemExit) as stopped:
        series.main([str(tmp_path / "wrong.yaml"), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "unknown keys ['seed'], missing keys ['seeds']" in capsys.readouterr().err


@pytest.mark.parametrize(
    "old, new, message",
    [("baseline: best b", "baseline: c", "baseline c is no arm"), ("best_of: a", "best_of: c", "best_of c begins")],
)
def test_names_of_no_arm_are_refused(tmp_path, old, new, message):
    (tmp_path / "wrong.yaml").write_text(TRIALS.replace(old, new))
    with pytest.raises(ValueError, match=message):
        series_file.read_series(tmp_path / "wrong.yaml")


@pytest.mark.parametrize("file", sorted(Path("benchmarks/losses").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_options_of_the_committed_series_are_valid(file):
    found = series_file.read_series(file)
    for run in found.runs[:: max(1, len(found.runs) // 8)]:
        options = found.runs[0].options | run.options if run.best_of else run.options
        load_config(Path(found.config), {key: str(value) for key, value in options.items()})


def test_done_runs_are_not_made_again_nor_runs_that_would_end_too_late(tiny, tmp_path):
    out = tmp_path / "results.jsonl"
    out.write_text(json.dumps(row("one", 0, 2.0)) + "\n" + '{"arm": "other rate", "se')
    queue = Queue(tiny, out, minutes=1.5)
    assert queue.next().arm == "other rate"  # its line was cut short
    assert queue.next() == tiny.runs[2]  # took 1 minute before
    assert queue.next() is None
    assert Queue(tiny, out, minutes=0.5).next() is None
    late = Queue(tiny, out, minutes=1.5)
    late.end = time.monotonic() + 61  # "one" still fits, its other arm's estimate of a minute too
    assert late.next() is not None


TRIALS = """
config: configs/quickstart.yaml
options: {train.steps: 5, optim.lr: 1}
seeds: 1
baseline: best b
arms:
  a 1: {program: benchmarks.torch_train}
  a 2: {optim.lr: 2, program: benchmarks.torch_train}
  b 1: {optim.lr: 3}
  best a: {best_of: a, seeds: 2}
  best b: {best_of: b, train.steps: 4}
"""


@pytest.fixture
def trials(tmp_path) -> Series:
    (tmp_path / "trials.yaml").write_text(TRIALS)
    return series_file.read_series(tmp_path / "trials.yaml")


def result(run, val) -> dict:
    return row(run.arm, run.seed, 2.0, val, options=run.options)


def test_the_best_of_several_arms_is_trained_again(trials, tmp_path):
    """Its first run is known, that of the arm that is the best."""
    assert trials.baseline == "best b"
    queue = Queue(trials, tmp_path / "results.jsonl", minutes=math.inf)
    for name, val in (("a 1", 2.5), ("a 2", 2.25), ("b 1", 2.125)):
        run = queue.next()
        assert run.arm == name
        queue.add(run, result(run, val))
    best_b, best_a = queue.next(), queue.next()
    assert (best_b.arm, best_b.seed, best_a.arm, best_a.seed) == ("best b", 0, "best a", 1)
    assert {**best_b.options, "train.steps": 5} == trials.runs[2].options and best_b.options["train.steps"] == 4
    assert {**best_a.options, "train.seed": 42, "data.seed": 42} == trials.runs[1].options
    assert (best_a.program, best_b.program) == ("benchmarks.torch_train", "gpt2_triton train")
    copied = read_results(tmp_path / "results.jsonl")[-1]
    assert (copied["arm"], copied["seed"], copied["val_loss"]) == ("best a", 0, 2.25)
    assert queue.next() is None
    again = Queue(trials, tmp_path / "results.jsonl", minutes=math.inf)
    assert [again.next().arm, again.next().arm, again.next()] == ["best b", "best a", None]


def test_a_gpu_waits_for_the_runs_that_decide_which_is_best(trials, tmp_path):
    queue = Queue(trials._replace(runs=trials.runs[2:3] + trials.runs[4:5]), tmp_path / "r.jsonl", minutes=math.inf)
    run, found = queue.next(), []
    other = threading.Thread(target=lambda: found.append(queue.next()))
    other.start()
    other.join(0.2)
    assert other.is_alive()
    queue.add(run, result(run, 2.0))
    other.join(60)
    assert found[0].arm == "best b"


def test_nothing_waits_for_a_trial_that_failed(trials, tmp_path, capsys):
    queue = Queue(trials._replace(runs=trials.runs[2:3] + trials.runs[4:5]), tmp_path / "r.jsonl", minutes=math.inf)
    queue.add(queue.next(), None, "exit code 3")
    assert queue.next() is None and queue.failed == 1
    assert "b 1 seed 0: exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize("freedom, value", [(1, 12.706), (5, 2.5706), (9, 2.2622), (30, 2.0423), (1000, 1.9623)])
def test_students_t_is_that_of_tables(freedom, value):
    assert math.isclose(series_report.student_t(freedom), value, rel_tol=2e-4)  # a table's last digit


def test_differences_are_those_of_pairs():
    rows = [row("a", seed, loss) for seed, loss in enumerate((2.0, 2.2, 2.1))]
    rows += [row("b", seed, loss) for seed, loss in enumerate((2.03, 2.21))]
    found = series_report.difference(rows, "b", "a", "train_loss")
    assert found.pairs == 2 and math.isclose(found.mean, 0.02)
    assert math.isclose(found.half, 12.7062 * 0.01, rel_tol=1e-3)  # t of 1 degree, sd 0.01 sqrt 2, over sqrt 2
    assert series_report.difference(rows, "b", "a", "val_loss") is None
    one = series_report.difference(rows[:4], "b", "a", "train_loss")
    assert one.half == math.inf and str(one) == "+0.0300"


def test_report_and_picture(tmp_path):
    runs = [Run(arm, seed, {}) for seed in (0, 1) for arm in ("a", "b")]
    rows = [row("a", 0, 2.0, 2.5), row("b", 0, 2.1, 2.4), row("a", 1, 2.2, 2.6), row("b", 1, 2.3, 2.6)]
    text = series_report.report(Series("c", runs, "a"), rows)
    assert "| a | 2 | 2.1000 | 0.1414 | 2.5500 | 0.0707 | 2.00 | 32,000 |  |  |" in text
    assert "+0.1000 +- 0.0000 (2) | -0.0500 +- 0.6353 (2) |" in text
    series_report.plot(Series("c", runs, "a"), rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_series_is_trained_and_goes_on_where_it_stopped(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    for name in ("train_000000", "val_000000"):
        write_shard(tmp_path / f"{name}.bin", np.arange(4000).astype(np.uint16) % 250)
    (tmp_path / "r.jsonl").write_text(json.dumps(row("one", 1, 2.0)) + "\n")
    words = [str(tmp_path / "tiny.yaml"), "--data", str(tmp_path), "--out", str(tmp_path / "r.jsonl")]
    assert series.main(words) == 0
    rows = read_results(tmp_path / "r.jsonl")[1:]
    assert [(r["arm"], r["seed"], r["steps"]) for r in rows] == [("one", 0, 5), ("other rate", 0, 5)]
    assert all(0 < r["train_loss"] < 7 and 0 < r["val_loss"] < 7 and len(r["curve"]) == 5 for r in rows)
    assert rows[0]["curve"][0] == rows[1]["curve"][0]  # the same weights and data
