"""The watchdog's diagnosis, and that one rank alone reports it.  Runs that hang are in
training/test_multi_rank.py.
"""

import itertools
import os
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from gpt2_triton.distributed import watchdog
from gpt2_triton.distributed.watchdog import Status, Watchdog, diagnose

AHEAD, BEHIND, OLDER = (
    Status(9, 40, 7, "training"),
    Status(9, 39, 6, "training"),
    Status(9, 38, 6, "saving"),
)


@pytest.mark.parametrize("states, silent, diagnosis", [
    ([AHEAD, AHEAD, BEHIND], [], "rank 2 is behind the others, training at step 6"),
    ([OLDER, BEHIND, AHEAD, OLDER], [], "ranks 0, 3 are behind the others, saving at step 6"),
    ([AHEAD, AHEAD], [], "all ranks are at the same point: the network, or a GPU"),
    ([AHEAD, BEHIND, BEHIND], [1, 2], "ranks 1, 2 are not responding"),
])  # fmt: skip
def test_diagnose_names_silent_ranks_before_those_behind(states, silent, diagnosis):
    assert diagnose(states, silent) == diagnosis


def test_report_is_printed_by_the_first_rank_alone(capsys, monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    dog = Watchdog(SimpleNamespace(rank=0, size=1, store=HashStore()), 0.0)
    dog.heartbeat(7)
    dog._report_and_exit("rank 2 is behind")
    dog._report_and_exit("rank 2 is behind")
    [message] = capsys.readouterr().err.splitlines()
    assert "at step 7: rank 2 is behind; " in message and message.endswith("--resume")
    assert codes == [1, 1]


class Watched:
    """A watchdog of rank 0 of two, with a timeout of 100 s, under a clock of its own;
    `published` is rank 1's state.
    """

    def __init__(self, monkeypatch, phase):
        self.now, self.reported, self.published = 1000.0, [], Status(1, 1, 1, phase)
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(Watchdog, "_publish", lambda dog: None)
        monkeypatch.setattr(
            Watchdog, "_report_and_exit", lambda dog, diagnosis: self.reported.append(diagnosis)
        )
        own = Status(1, 1, 1, phase)
        both = lambda dog: [own._replace(tick=int(self.now)), self.read()]  # noqa: E731
        monkeypatch.setattr(Watchdog, "_read_all", both)
        self.dog = Watchdog(SimpleNamespace(rank=0, size=1, store=HashStore()), 100.0)
        self.dog._phase, self.read = phase, lambda: self.published

    def after(self, seconds: int) -> list[str]:
        """Return the reports of the next seconds, with a check in each."""
        for _ in range(seconds):
            self.now += 1
            self.dog._check()
        return self.reported


def alive(watched):
    """Let rank 1 publish, without progress."""
    ticks = itertools.count(2)
    watched.read = lambda: watched.published._replace(tick=next(ticks))


def test_silent_rank_is_named_after_two_timeouts_in_a_slow_phase(monkeypatch):
    """Its process is stopped; the others validate and wait for it."""
    watched = Watched(monkeypatch, "validating")
    assert watched.after(199) == [] and watched.after(3)[:1] == ["rank 1 is not responding"]


def test_slow_phase_of_any_rank_has_ten_timeouts(monkeypatch):
    watched = Watched(monkeypatch, watchdog.STEPPING)
    watched.published = watched.published._replace(phase="validating")
    alive(watched)
    assert watched.after(999) == [] and watched.after(2) != []


def test_a_step_has_one_timeout_once_start_up_has_ended(monkeypatch):
    watched = Watched(monkeypatch, watchdog.STARTING)
    watched.dog.end_startup()
    watched.read = lambda: Status(int(watched.now), 1, 1, watchdog.STEPPING)
    own = Watchdog._read_all
    monkeypatch.setattr(
        Watchdog, "_read_all", lambda dog: [s._replace(phase=dog._phase) for s in own(dog)]
    )
    assert watched.after(99) == [] and watched.after(7) != []


def test_a_rank_that_was_suspended_watches_before_it_reports(monkeypatch):
    """The others may have made progress meanwhile."""
    watched = Watched(monkeypatch, watchdog.STEPPING)
    alive(watched)
    watched.now += 500
    assert watched.after(4) == [] and watched.after(4) != []
