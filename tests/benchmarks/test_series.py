"""benchmarks/series.py: which runs are made, what is kept of one, how it ends, and the statistics of the report."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import series, series_file, series_report, series_results, series_runs
from benchmarks.series_file import Run, Series, choose
from benchmarks.series_results import differing_rows, read_results
from benchmarks.series_runs import Queue, StoppedError
from gpt2_triton import device
from gpt2_triton.data.shards import write_shard
from gpt2_triton.training.metrics import METRICS
from gpt2_triton.training.run_info import write_run

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
    return curve | dict(arm=arm, seed=seed, options={}, train_loss=loss, val_loss=val) | more


@pytest.fixture
def tiny(tmp_path) -> Series:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return series_file.read_series(tmp_path / "tiny.yaml")


def test_runs_go_by_seed_then_arm_and_share_a_seed(tiny):
    assert [(run.arm, run.seed) for run in tiny.runs] == [("one", 0), ("other rate", 0), ("one", 1)]
    first, other, second = tiny.runs
    assert first.options | {"optim.lr": "2e-3"} == other.options and other.minutes == 1
    assert {key for key in first.options if first.options[key] != second.options[key]} == {"train.seed", "data.seed"}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Call the command with a series that it must refuse in one line, before any run; return the line."""
    for name in ("train_0", "val_0"):
        (tmp_path / f"{name}.bin").touch()
    monkeypatch.setattr(series, "train", lambda *_: pytest.fail("a run began"))

    def call(text, *words, code=2):
        file, out = tmp_path / "s.yaml", tmp_path / "r.jsonl"
        file.write_text(text)
        given = {"--out": str(out), "--data": str(tmp_path)}
        words = [*words, *(word for item in given.items() if item[0] not in words for word in item)]
        assert series.main([str(file), *words]) == code
        (line,) = capsys.readouterr().err.splitlines()
        return line.replace(f"{tmp_path}/", "")

    return call


@pytest.mark.parametrize(
    "old, new, message",
    [
        (TINY, "hello", "s.yaml: expected keys such as `config:` and `arms:`, got str"),
        (TINY, "arms: {a: {}}\nseed: 2\nconfig: x\n", "s.yaml: unknown keys ['seed'], missing keys ['seeds']; "),
        ("arms:", "arms: [", "s.yaml:20:3: not valid YAML: expected "),
        ("seeds: 2", "seeds: x", "s.yaml:17: seeds: got 'x', expected a number of at least 1"),
        ("seeds: 1", "seeds: 0", "s.yaml:20: arms.other rate.seeds: got 0, expected a number of at least 1"),
        ("minutes: 1", "minutes: no", "s.yaml:20: arms.other rate.minutes: got False, expected minutes above 0"),
        ("one: {}", "one 0.5: {seeds: x}", "s.yaml:19: arms.one 0.5.seeds: got 'x', expected a number"),
        ("one: {}", "one: two", "s.yaml:19: arms.one: got 'two', expected options and their values"),
        ("one: {}", "1: {}", "s.yaml:18: arms: got 1, expected a name in quotes"),
        (
            "one: {}",
            "one: {program: benchmarks.trian}",
            "s.yaml:19: arms.one.program: got 'benchmarks.trian', expected ",
        ),
        ("seeds: 2", "seeds: 2\nbaseline: c", "s.yaml:18: baseline: got 'c', expected an arm: one, other rate"),
        ("seeds: 2", "seeds: 2\nbaseline: [one]", "s.yaml:18: baseline: got ['one'], expected an arm: one, other rate"),
        (
            "seeds: 2",
            "seeds: 1000000000",
            "s.yaml:17: seeds: got 1000000000, expected a number of at least 1, at most ",
        ),
        ("one: {}", "one: {train.seed: 1}", "s.yaml:19: arms.one: got {'train.seed': 1}, expected options and their"),
        (
            "options:",
            "options:\n  data.seed: 1",
            "s.yaml:3: options: got {'checkpoint.every': 0, 'data.seed': 1, ",
        ),
        ("one: {}", "best: {best_of: c}", "s.yaml:19: arms.best.best_of: got 'c', expected the beginning of the name"),
        ("one: {}", "one: {against: one}", "s.yaml:19: arms.one.against: got 'one', expected another arm: other rate"),
        ("one: {}", "best: {best_of: o, optim.warmpu: 1}", "s.yaml: arms.best: --optim.warmpu: unknown key; did you"),
        ("one: {}", "one: {log.every: 2}", "s.yaml: arms.one: log.every: a result needs the loss of every step; "),
        (
            "one: {}",
            "best: {best_of: o, eval.every: 0}",
            "s.yaml: arms.best: eval.every: the best trial is that of the least validation loss; not 0",
        ),
        ("optim.lr", "optim.lrr", "s.yaml: arms.other rate: --optim.lrr: unknown key; did you mean "),
        ("train.steps: 5", "train.steps: five", "s.yaml: arms.one: --train.steps: "),
    ],
)
def test_a_wrong_file_is_one_line_before_any_run(refused, old, new, message):
    assert refused(TINY.replace(old, new)).startswith(f"error: {message}")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--plot", "p.jpeg"], "--plot: p.jpeg does not end in .png, .svg, .pdf; choose one of them"),
        (["--plot", "none/p.png"], "--plot: none is not a directory; make it, or choose another"),
        (["--data", "none"], "--data: none is not a directory; expected the directory of train_*.bin and val_*.bin"),
        (["--data", "docs"], "--data: docs has no train_*.bin and no val_*.bin; expected the directory of train_*.bin"),
        (["--out", "none/r.jsonl"], "--out: none is not a directory; make it, or choose another"),
        (["--out", "docs"], "--out: docs is a directory; name a file in it"),
        (["--out", "/proc/version"], "/proc/version:1: got 'Linux version"),
        (["--report"], "--out: there is no file r.jsonl; expected results to report"),
        (["--minutes", "nan"], "--minutes: must be at least 0, got nan"),
        (["--minutes", "-1"], "--minutes: must be at least 0, got -1.0"),
        (["--gpus", "0,a"], "--gpus: got 'a' in '0,a', expected different numbers, such as 0,1"),
        (["--gpus", "1,1"], "--gpus: got '1' in '1,1', expected different numbers, such as 0,1"),
        (["--seeds", "0,2"], "--seeds: got '2', expected numbers from 0 to 1, such as 0,1"),
        (["--arm", "fp9"], "--arm: got 'fp9', expected one of '"),
    ],
)
def test_wrong_options_are_one_line_before_any_run(refused, words, message):
    assert refused(TINY, *words).startswith(f"error: {message}")


@pytest.mark.parametrize(
    "count, gpus, message",
    [
        (2, "0,9", "--gpus: got 9, expected numbers from 0 to 1, the GPUs found here"),
        (0, "1", "--gpus: got 1, expected a CUDA GPU, found none; leave --gpus out to train on the CPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_before_any_run(refused, monkeypatch, count, gpus, message):
    monkeypatch.setattr(series_file.device, "count", lambda: count)
    assert refused(TINY, "--gpus", gpus) == f"error: {message}"


def test_results_that_cannot_be_written_are_refused_before_any_run(refused, tmp_path, monkeypatch):
    def read_only(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(series_results, "open_regular", read_only)
    assert refused(TINY) == "error: --out: cannot write r.jsonl: Permission denied; choose another"


@pytest.mark.parametrize("file", sorted(Path("benchmarks/losses").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_options_of_the_committed_series_are_valid(file):
    series_file.check_options(series_file.read_series(file))


@pytest.mark.parametrize("file", sorted(Path("benchmarks/losses").glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_committed_results_are_those_of_their_series(file):
    found, rows = series_file.read_series(file.with_suffix(".yaml")), read_results(file)
    assert rows and not differing_rows(found, rows, file)
    rows[0]["options"]["optim.lr"] = 1.0
    assert len(differing_rows(found, rows, file)) == 1


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
    return row(run.arm, run.seed, 2.0, val, options=run.options, program=run.program)


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


def test_a_trial_whose_loss_is_not_finite_is_not_the_best(trials, tmp_path):
    queue = Queue(trials, tmp_path / "results.jsonl", minutes=math.inf)
    for val in (None, 2.25, None):
        run = queue.next()
        queue.add(run, result(run, val))
    best_a = queue.next()
    assert (best_a.arm, best_a.options["optim.lr"]) == ("best a", 2)
    queue.add(best_a, result(best_a, 2.25))
    assert queue.next() is None and [run.arm for run in queue.left] == ["best b"]  # no trial of b has a loss


def test_runs_that_are_left_are_told(fake, tmp_path, capsys):
    """With no time for any run the table has none, and the console says so."""
    series.main([*fake("1"), "--minutes", "0"])
    assert "runs are not made, the first is one seed 0: no time is left" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_counts_as_the_one_before(tiny, tmp_path):
    losses = [5.0, 4.0, None, 3.0, 2.0]
    steps = [dict(step=n + 1, loss=loss, ms=1.0, tokens=8 * n + 8) for n, loss in enumerate(losses)]
    (tmp_path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in steps))
    write_run(tmp_path, None, [dict(schedule=dict(steps=5), git=None, device="cpu", packages={})])
    found = series_runs.result_of(tiny, tiny.runs[0], tmp_path, "digest", 1.0)
    assert found["curve"] == [5.0, 4.0, 4.0, 3.0, 2.0] and found["train_loss"] == 2.0


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
    turned = [run._replace(against="b" if run.arm == "a" else "") for run in runs]
    text = series_report.report(Series("c", turned, "a"), rows)
    assert "| -0.1000 +- 0.0000 (2) against b | +0.0500 +- 0.6353 (2) against b |" in text
    earlier = series_report.report(Series("c", runs[::2], "a"), rows)  # b has results only
    assert "| b | 2 | 2.2000 |" in earlier and "+0.1000 +- 0.0000 (2) | -0.0500 +- 0.6353 (2) |" in earlier
    series_report.plot(Series("c", runs, "a"), rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_series_is_trained_and_goes_on_where_it_stopped(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    for name in ("train_000000", "val_000000"):
        write_shard(tmp_path / f"{name}.bin", np.arange(4000).astype(np.uint16) % 250)
    last = series_file.read_series(tmp_path / "tiny.yaml").runs[2]
    (tmp_path / "r.jsonl").write_text(json.dumps(result(last, None)) + '\n{"arm": "one", "se')  # cut short
    words = [str(tmp_path / "tiny.yaml"), "--data", str(tmp_path), "--out", str(tmp_path / "r.jsonl")]
    assert series.main(words) == 0
    rows = read_results(tmp_path / "r.jsonl")[1:]
    assert [(r["arm"], r["seed"], r["steps"]) for r in rows] == [("one", 0, 5), ("other rate", 0, 5)]
    assert all(0 < r["train_loss"] < 7 and 0 < r["val_loss"] < 7 and len(r["curve"]) == 5 for r in rows)
    assert rows[0]["curve"][0] == rows[1]["curve"][0]  # the same weights and data
    assert {r["data"] for r in rows} == {series_results.data_digest(tmp_path)}


# ---- the file of results ----


@pytest.fixture
def done(tiny, tmp_path) -> Path:
    """Return a file of the results of all runs of the tiny series, beside it."""
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(result(run, 2.0)) + "\n" for run in tiny.runs))
    return path


def test_a_line_that_was_cut_short_is_removed_before_the_next(tiny, done, capsys):
    lines = done.read_bytes().splitlines(keepends=True)
    done.write_bytes(lines[0] + lines[1][:-20])
    series_results.append_result(done, json.loads(lines[2]))
    assert done.read_bytes() == lines[0] + lines[2]
    assert "removed the last line, which was cut short" in capsys.readouterr().err
    done.write_bytes(lines[0] + lines[1][:-20])
    series_results.prepare(done)
    assert done.read_bytes() == lines[0]


def test_a_whole_last_line_without_its_end_is_kept(tiny, done):
    lines = done.read_bytes().splitlines(keepends=True)
    done.write_bytes(lines[0] + lines[1].strip())
    assert [row["arm"] for row in read_results(done)] == ["one", "other rate"]
    series_results.append_result(done, json.loads(lines[2]))
    assert done.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("line", ['{"arm": "one", "se{"arm": "one"}', "[1]", '{"arm": "one", "seed": 0}', "\xff\0"])
@pytest.mark.parametrize("words", [[], ["--report"]])
def test_an_unreadable_line_is_named(refused, done, line, words):
    done.write_bytes(done.read_bytes() + line.encode("latin-1") + b"\n" + done.read_bytes())
    message = refused(TINY, *words)
    assert message.startswith("error: r.jsonl:4: got ")
    assert message.endswith(
        "expected a result, a JSON object; correct the line, or remove it and its run is made again"
    )


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("one: {}", "one: {optim.lr: 1e-3}", "one seed 0: optim.lr is not given there, 1e-3 in s.yaml; "),
        ("optim.lr: 2e-3", "optim.lr: 3e-3", "other rate seed 0: optim.lr is 2e-3 there, 3e-3 in s.yaml; "),
        (
            "{optim.lr: 2e-3",
            "{optim.v: bf16",
            "optim.lr is 2e-3 there, not given in s.yaml, optim.v is not given there, b",
        ),
        (
            "{optim.lr",
            "{program: benchmarks.levers cautious, optim.lr",
            "program is gpt2_triton train there, benchmarks.l",
        ),
    ],
)
def test_results_of_other_options_are_refused(refused, done, capsys, tmp_path, old, new, message):
    done.write_text("".join(line + "\n" for line in done.read_text().splitlines()[:2]))
    line = refused(TINY.replace(old, new))
    assert line.startswith("error: r.jsonl: ") and message in line
    assert line.endswith("; choose another --out, or remove the line and the run is made again")
    assert refused(TINY.replace(old, new), "--report", code=0) == line.replace("error", "warning")


def test_results_of_other_data_are_refused(refused, done, tmp_path):
    """Results of earlier versions do not say of which data they are."""
    rows = read_results(done)[:2]
    rows[1]["data"] = series_results.data_digest(tmp_path)
    assert not series_results.rows_on_other_data(rows, tmp_path, done)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train_0", "val_0"):
        (other / f"{name}.bin").write_bytes(b"other")
    assert series_results.data_digest(other) != rows[1]["data"]
    done.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refused(TINY, "--data", str(other))
    assert line.startswith(f"error: r.jsonl: other rate seed 0: trained on data {rows[1]['data']}, other is ")
    assert line.endswith("; choose another --out, or remove the line and the run is made again")


def test_data_that_cannot_be_read_is_one_line(refused, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train_0.bin").touch()
    (tmp_path / "data" / "val_0.bin").mkdir()
    assert refused(TINY, "--data", str(tmp_path / "data")).startswith("error: --data: cannot read data/val_0.bin: ")


def test_runs_on_different_data_are_no_pair():
    rows = [row("a", seed, 2.0, data="x") for seed in range(3)]
    rows += [row("b", 0, 2.5, data="x"), row("b", 1, 2.5), row("b", 2, 9.0, data="y")]
    assert series_report.difference(rows, "b", "a", "train_loss") == (2, 0.5, 0.0)


def test_pairs_of_two_commits_or_kinds_of_gpu_are_told():
    rows = [row("a", 0, 2.0, commit="1", device="H200"), row("a", 1, 2.0, commit="1", device="H200"), row("a", 2, 2.0)]
    rows += [row("b", 0, 2.1, commit="1", device="H200"), row("b", 1, 2.1, commit="2", device="H100")]
    rows += [row("b", 2, 2.1, commit="2", device="H100")]  # the other half does not say
    told = ["b: 1 of 3 pairs with a are of two commits", "b: 1 of 3 pairs with a are from two kinds of GPU"]
    runs = [Run(arm, seed, {}) for seed in range(3) for arm in ("a", "b")]
    assert series_report.report(Series("c", runs, "a"), rows).splitlines()[4:] == told


def test_results_without_a_program_are_of_the_package(refused, done, tiny):
    rows = read_results(done)[1:2]
    del rows[0]["program"]
    assert not differing_rows(tiny, rows, done)
    done.write_text(json.dumps(rows[0]) + "\n")
    line = refused(TINY.replace("{optim.lr", "{program: benchmarks.levers cautious, optim.lr"))
    assert line.endswith('add "program": "benchmarks.levers cautious" to the line if that is what made it')


def test_the_same_number_written_otherwise_is_the_same_option(tiny, done):
    rows = read_results(done)
    rows[1]["options"]["optim.lr"] = 0.002
    assert not differing_rows(tiny, rows, done)


def test_a_change_of_all_runs_is_a_few_lines(tiny, done):
    rows = read_results(done) * 4
    changed = tiny._replace(runs=[run._replace(options=run.options | {"optim.lr": 1}) for run in tiny.runs])
    lines = differing_rows(changed, rows, done)
    assert len(lines) == 6 and lines[-1].endswith(f"7 more results differ from {tiny.file}")


def test_results_of_a_trial_that_is_no_longer_the_best_are_refused(trials, tmp_path, capsys):
    """Before all trials have ended, a result of any of them may be that of the best."""
    out = tmp_path / "r.jsonl"
    a1, a2, best = trials.runs[0], trials.runs[1], series_file.with_trial(trials.runs[3], trials.runs[0])
    rows = [result(a1, 2.5), result(best, 2.5)]
    assert not differing_rows(trials, rows, out)
    (line,) = differing_rows(trials, [*rows, result(a2, 2.25)], out)
    now = "the best of a is a 2; optim.lr is 1 there, 2 in "
    assert line.startswith(f"{out}: best a seed 0: {now}")

    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    queue = Queue(trials, out, math.inf)
    assert (run := queue.next()) == a2
    queue.add(run, result(run, 2.25))
    assert queue.next().arm == "b 1" and queue.failed == 0
    queue.add(trials.runs[2], result(trials.runs[2], 2.0))
    assert (queue.next().arm, queue.next(), queue.failed) == ("best b", None, 1)  # best a of seed 1 is not made
    assert f"best a seed 1: not made: {out}: best a seed 0: {now}" in capsys.readouterr().err


def test_seeds_are_chosen_and_their_trials_are_those_of_the_first(trials, tmp_path):
    out = tmp_path / "r.jsonl"
    out.write_text("".join(json.dumps(result(run, 2.0)) + "\n" for run in trials.runs[:2]))
    queue = Queue(trials, out, math.inf, choose(trials, "1", None))
    assert (queue.next().arm, queue.next()) == ("best a", None)


def test_arms_are_chosen_by_their_names(trials):
    every = list(trials.runs)
    assert choose(trials, None, None) == every
    assert choose(trials, None, ["b 1", "a 1"]) == [run for run in every if run.arm in ("a 1", "b 1")]
    assert [(run.arm, run.seed) for run in choose(trials, "1", ["best a"])] == [("best a", 1)]


# ---- processes ----

ON_THE_CPU = "no CUDA GPU found: the runs train on the CPU\n"

FAKE = """
import os, signal, subprocess, sys, time
run_dir = sys.argv[sys.argv.index("--run_dir") + 1]
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "fails" not in sys.argv:
    os.mkdir(run_dir)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open(os.environ["STARTED"] + ".new", "w") as file:
        file.write(f"{os.getpid()} {child.pid} {run_dir}")
    os.rename(os.environ["STARTED"] + ".new", os.environ["STARTED"])
    time.sleep(3600)
sys.exit(3)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that writes a series of one run by a program which sleeps, `stubborn` without an end by
    SIGTERM, or fails; and returns the command's words.
    """
    (tmp_path / "fake_train.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    for name in ("train_0", "val_0"):
        (tmp_path / f"{name}.bin").touch()

    def write(how):
        text = TINY.replace("one: {}", f"one: {{program: fake_train {how}}}").replace("seeds: 2", "seeds: 1")
        (tmp_path / "fake.yaml").write_text(text.partition("  other rate")[0])
        return [str(tmp_path / "fake.yaml"), "--data", str(tmp_path), "--out", str(tmp_path / "r.jsonl")]

    return write


def started(tmp_path) -> tuple[list[int], Path]:
    """Wait for the program; return its process, that which it has started, and its run directory."""
    while not (tmp_path / "started").exists():
        time.sleep(0.02)
    *pids, run_dir = (tmp_path / "started").read_text().split()
    return [int(pid) for pid in pids], Path(run_dir)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_ended(pids: list[int], run_dir: Path) -> None:
    assert not run_dir.parent.exists()
    while any(map(is_running, pids)):  # SIGKILL was sent; the system may take its time
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_runs_and_is_one_line(fake, tmp_path, number, code):
    command = [sys.executable, "-m", "benchmarks.series", *fake("sleeps")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids, run_dir = started(tmp_path)
    assert run_dir.exists() and all(map(is_running, pids))
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == code and out == ("" if device.present() else ON_THE_CPU)
    name = signal.Signals(number).name
    results = tmp_path / "r.jsonl"
    assert err == f"error: stopped by {name}: {results} has 0 results; the same command continues\n"
    assert_ended(pids, run_dir)


def signal_when_started(tmp_path, found, times):
    found += started(tmp_path)
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # equal signals that wait are one


@pytest.mark.slow
@pytest.mark.parametrize("grace, times", [(0.5, 1), (1e9, 3)])
def test_a_program_that_ignores_sigterm_is_killed(fake, tmp_path, monkeypatch, grace, times):
    """After a grace, or by a second signal."""
    monkeypatch.setattr(series_runs, "GRACE", grace)
    found, words = [], fake("stubborn")
    sender = threading.Thread(target=signal_when_started, args=(tmp_path, found, times))
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # for one that comes after the end
    try:
        sender.start()
        with pytest.raises(StoppedError, match="stopped by SIGTERM"):
            series_runs.train(series_file.read_series(Path(words[0])), tmp_path, tmp_path / "r.jsonl")
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)
    assert_ended(*found)


def test_a_run_that_fails_and_a_worker_that_dies_are_failures(fake, tmp_path, monkeypatch, capsys):
    assert series.main(fake("fails")) == 1
    assert "one seed 0: not finished, exit code 3" in capsys.readouterr().err
    monkeypatch.setattr(Queue, "add", lambda *_: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert series.main(fake("fails")) == 1


def test_runs_take_the_interpreter_without_a_gpu(fake, tmp_path, monkeypatch, capsys):
    """A program may import Triton before it knows that there is no GPU."""
    seen = []
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device, "present", lambda: False)
    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(series_runs.Processes, "run", lambda _, words, environment: seen.append(environment) or (3, ""))
    assert series.main(fake("fails")) == 1
    assert capsys.readouterr().out.startswith(ON_THE_CPU)
    assert [environment["TRITON_INTERPRET"] for environment in seen] == ["1"]


@pytest.mark.parametrize("visible, taken", [(None, "1"), ("2,5", "5")])
def test_numbers_of_gpus_are_among_those_that_are_visible(monkeypatch, visible, taken):
    monkeypatch.setattr(device, "present", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert series_runs.environment_of("1")["CUDA_VISIBLE_DEVICES"] == taken


def test_results_that_the_disk_refuses_end_the_series(tiny, tmp_path, monkeypatch, capsys):
    queue = Queue(tiny, tmp_path / "r.jsonl", math.inf)
    run = queue.next()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(series_runs, "append_result", full)
    queue.add(run, result(run, 2.0))
    assert queue.next() is None and queue.failed == 1
    assert "cannot be written (No space left on device): the result of one seed 0 is lost" in capsys.readouterr().err


def test_a_result_that_cannot_be_read_is_a_failure(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(series_runs.Processes, "run", lambda *_: (0, "done"))
    assert series.main(fake("fails")) == 1
    assert "one seed 0: its result cannot be read\nTraceback" in capsys.readouterr().err
