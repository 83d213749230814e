"""benchmarks/curves.py and its use of agreement.py: the runs are comparable and end on time.  Whether losses agree
is tested by running the script on a GPU.
"""

import json

import numpy as np
import pytest
import torch

from benchmarks import agreement, curves
from benchmarks.agreement import History, Pace
from gpt2_triton.data.shards import write_shard
from tests.support.tiny import tiny_config


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """curves.py with a tiny model and a text of eight tokens, and the arguments that it needs."""
    write_shard(tmp_path / "t.bin", (np.arange(400) % 8).astype(np.uint16))

    def config_of(tokens, steps, batch, master):
        train = dict(steps=steps, batch_size=batch, dtype="bf16")
        return tiny_config(data=dict(train=str(tokens), val=str(tokens)), train=train, optim=dict(master=master))

    monkeypatch.setattr(curves, "config_of", config_of)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    arguments = ["curves", "--tokens", str(tmp_path / "t.bin"), "--out", str(tmp_path / "out"), "--batch", "2"]

    def run(*more):
        monkeypatch.setattr("sys.argv", [*arguments, *more])
        code = curves.main()
        assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
        return code, json.loads((tmp_path / "out" / "curves.json").read_text())

    return run


class Clock:
    """Replaces the module time; each call of perf_counter advances it by `tick` seconds."""

    def __init__(self, tick):
        self.now, self.tick = 0.0, tick

    def perf_counter(self):
        self.now += self.tick
        return self.now


def test_three_runs_have_equal_steps_and_initial_losses(tiny, capsys):
    """The loss falls from 5.5 by at least 0.2; the script itself allows differences of 1%."""
    code, record = tiny("--steps", "3")
    first, *_, last = np.array(list(record["losses"].values())).T
    assert code == 0 and len(record["losses"]) == 3 and record["config"]["train"]["steps"] == 3
    assert np.ptp(first) < 0.01 and np.ptp(last) < 0.05 and (last < first - 0.2).all()
    assert "agreed: final mean losses differ by" in capsys.readouterr().out


def test_minutes_end_a_run_and_torch_trains_as_many_steps_from_fp32_weights(tiny, monkeypatch, capsys):
    monkeypatch.setattr(agreement, "time", Clock(tick=1.0))
    handed = []
    monkeypatch.setattr(curves, "train_torch", lambda *a, **k: handed.append(a[1]) or agreement.train_torch(*a, **k))
    code, record = tiny("--minutes", "0.2")
    ours, theirs = record["losses"].values()
    assert 2 <= len(ours) == len(theirs) == record["config"]["train"]["steps"] <= 12  # 12 s, a few per step
    assert abs(ours[0] - theirs[0]) < 0.01
    assert (handed[0] != handed[0].bfloat16()).float().mean() > 0.5
    printed = capsys.readouterr()
    assert code == 1 and "DISAGREED: steps to losses of (1.0, 0.1) are not known: train for more minutes" in printed.out
    assert printed.out.count("tokens/s; below 1.0 after none, below 0.1 after none; mean loss") == 2


@pytest.mark.parametrize("minutes", [np.inf, 1])
def test_pace_ends_after_its_minutes(monkeypatch, minutes):
    clock = Clock(tick=0.0)
    monkeypatch.setattr(agreement, "time", clock)
    pace = Pace("run", 100, minutes)
    clock.now += 59
    pace.advance(2.5)
    assert pace.on_time()
    clock.now += 1
    assert pace.on_time() == (minutes == np.inf) and pace.end() == 60


def test_first_below_uses_the_mean_of_20_steps():
    losses = [3.0] * 30 + [0.0] * 30
    assert curves.first_below(losses, 1.0) == 30 + 14  # 6 of 3.0 are left: 0.9
    assert curves.first_below(losses, 0.1) == 30 + 20
    assert curves.first_below(losses, 0.0) is None
    assert curves.first_below(losses[30:49], 1.0) is None  # 19 are too few for a mean


@pytest.mark.parametrize(
    ("ours", "theirs", "lag"),
    [((100, 200), (100, 200), 0.0), ((100, 204), (100, 200), 4 / 219), ((104, 200), (100, 200), 4 / 120)],
)
def test_largest_lag_is_relative_in_steps_to_a_level(ours, theirs, lag):
    runs = {name: falling(*at) for name, at in (("ours", ours), (curves.PYTORCH, theirs))}
    assert curves.largest_lag(runs) == pytest.approx(lag)


def test_largest_lag_counts_a_missed_second_level_and_needs_the_first():
    almost, whole, neither = falling(100, 295, 310), falling(100, 285, 310), falling(290, 400, 300)
    assert curves.largest_lag({"ours": whole, curves.PYTORCH: almost}) == pytest.approx(1 - 304 / 311)
    assert curves.largest_lag({"ours": neither, curves.PYTORCH: neither}) == float("inf")


def falling(first: int, second: int, steps: int = 400) -> History:
    """Return losses of 5, then 0.9 from step `first` on, then 0.05 from step `second` on."""
    losses = [5.0] * first + [0.9] * (second - first) + [0.05] * (steps - second)
    return History(losses[:steps], [], 1.0)
