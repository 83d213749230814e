"""The watchdog's diagnosis, and that one rank alone reports it.  Runs that hang are in training/test_multi_rank.py."""

import itertools
import os
from types import SimpleNamespace

import pytest

from gpt2_triton.distributed import watchdog
from gpt2_triton.distributed.watchdog import State, Watchdog, diagnose

AHEAD, BEHIND, OLDER = State(9, 40, 7, "training"), State(9, 39, 6, "training"), State(9, 38, 6, "saving")


@pytest.mark.parametrize("states, silent, diagnosis", [
    ([AHEAD, AHEAD, BEHIND], [], "rank 2 is behind the others, training at step 6"),
    ([OLDER, BEHIND, AHEAD, OLDER], [], "ranks 0, 3 are behind the others, saving at step 6"),
    ([AHEAD, AHEAD], [], "all ranks are at the same point: the network, or a GPU"),
    ([AHEAD, BEHIND], [0], "rank 0 is not responding"),
    ([AHEAD, BEHIND, BEHIND], [1, 2], "ranks 1, 2 are not responding"),
])  # fmt: skip
def test_diagnose_names_silent_ranks_before_those_behind(states, silent, diagnosis):
    assert diagnose(states, silent) == diagnosis


class Store(dict):
    """torch.distributed's key-value store, as far as the watchdog needs it."""

    set = dict.__setitem__

    def __init__(self):
        self.counts = itertools.count(1)

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]

    def add(self, _key, _amount):
        return next(self.counts)


def single_watchdog() -> Watchdog:
    """Return a watchdog without a thread, whose steps take no time."""
    made = Watchdog(SimpleNamespace(rank=0, size=1, store=Store()), 0.0)
    made.heartbeat(7)
    return made


def test_report_is_printed_by_the_first_rank_alone(capsys, monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    dog = single_watchdog()
    dog._report_and_exit("rank 2 is behind")
    dog._report_and_exit("rank 2 is behind")
    [message] = capsys.readouterr().err.splitlines()
    assert message == "error: rank 0: no progress for 0 s at step 7: rank 2 is behind; restart the job, with --resume"
    assert codes == [1, 1]


def test_state_is_read_as_it_was_published_and_starting_before_that():
    dog = single_watchdog()
    assert dog._read_all() == [State(0, 0, 0, watchdog.STARTING)]
    with dog.phase("saving"):
        dog._publish()
        assert dog._read_all() == [State(1, 2, 7, "saving")]
    dog.end_startup()
    dog._publish()
    assert dog._read_all() == [State(2, 3, 7, watchdog.STEPPING)]


def test_slow_phase_of_any_rank_extends_the_timeout(monkeypatch):
    """Two ranks, 2 s without progress, a timeout of 1 s."""
    reported = []
    monkeypatch.setattr(Watchdog, "_report_and_exit", lambda self, diagnosis: reported.append(diagnosis))
    dog = single_watchdog()
    dog._timeout, dog._last_progress = 1.0, dog._last_progress - 2
    for phases, reports in ((("training", "saving"), 0), (("starting", "training"), 0), (("training", "training"), 1)):
        states = [State(1, 1, 1, phase) for phase in phases]
        monkeypatch.setattr(Watchdog, "_read_all", lambda self, states=states: states)
        dog._check_progress()
        assert len(reported) == reports
    assert reported == ["rank 1 is not responding"]
