"""The promises of signals: one is a request, a second an order; what launchers repeat is no second one."""

import os
import signal

import pytest

from gpt2_triton.signals import ECHO, Signals


@pytest.fixture
def left(monkeypatch):
    """The exit codes of a process that would have left at once; the handlers are put back."""
    codes, handlers = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(os, "_exit", codes.append)
    yield codes
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_alone_stops_at_the_first_signal_and_leaves_at_the_second(left, number):
    signals = Signals(1)
    signals.listen()
    assert not signals.stop
    signal.raise_signal(number)
    assert signals.stop and signals.exit_code == 128 + number and not left
    signal.raise_signal(signal.SIGINT)
    assert left == [130]


def test_of_several_ranks_one_waits_for_the_others_and_takes_an_echo_for_the_first(left, monkeypatch):
    signals, moment = Signals(2), 100.0
    monkeypatch.setattr("time.monotonic", lambda: moment)
    signals.listen()
    signal.raise_signal(signal.SIGTERM)
    moment += ECHO
    signal.raise_signal(signal.SIGTERM)
    assert signals.heard and not signals.stop and not left
    moment += ECHO + 1
    signal.raise_signal(signal.SIGTERM)
    assert left == [143]


def test_a_rank_that_heard_nothing_stops_with_the_others_as_if_by_sigterm():
    signals = Signals(2)
    signals.agreed = True
    assert signals.stop and signals.exit_code == 143
