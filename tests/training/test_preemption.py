"""Signals: the first ends a run after its step, the second at once; a launcher's
repetition is not a second one.
"""

import itertools
import os
import pty
import signal
import sys

import pytest

from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.training.preemption import (
    LAUNCHED_WINDOW,
    NUMBERS,
    PREEMPTED,
    REPEAT_WINDOW,
    BorrowedSignals,
    ShutdownSignals,
)
from tests.support.checkpoints import load_checkpoint


@pytest.fixture
def exit_codes(monkeypatch):
    """Exit codes with which the process would have ended at once; the
    handlers are restored afterwards.
    """
    codes, handlers = [], {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as where nohup did not start the tests
    monkeypatch.setattr(os, "_exit", codes.append)
    yield codes
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_signals_on_one_rank_first_stops_second_exits(
    exit_codes, tmp_path, monkeypatch, capfd, number
):
    """A repeat within a second is the same event: a shell and the kernel both send
    SIGHUP as a terminal is closed.
    """
    signals, moment = ShutdownSignals(1), 100.0
    monkeypatch.setattr("time.monotonic", lambda: moment)
    signals.begin_loop(tmp_path)
    assert not signals.stop
    signal.raise_signal(number)
    moment += REPEAT_WINDOW
    signal.raise_signal(number)
    assert (
        signals.stop and signals.received == number and not exit_codes and not os.listdir(tmp_path)
    )
    again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
    line = f"stopping after this step; {again} after 1 s ends at once without a checkpoint\n"
    assert capfd.readouterr().out == line
    moment += 0.5
    signal.raise_signal(signal.SIGINT)
    assert exit_codes == [130] and os.listdir(tmp_path) == [PREEMPTED]
    ended = (
        "ended at once: steps since the last checkpoint are lost; the same command with --run_dir"
    )
    assert capfd.readouterr().out == f"{ended} {tmp_path} --resume continues\n"


def test_signals_of_a_cpu_limit_come_each_second_and_are_one(exit_codes, tmp_path, monkeypatch):
    signals, moments = ShutdownSignals(1), itertools.count(100.0, 1.1)
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    signals.begin_loop(tmp_path)
    for _ in range(3):
        signal.raise_signal(signal.SIGXCPU)
    assert signals.stop and not exit_codes


def test_signals_ignore_sighup_under_nohup(exit_codes, tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = ShutdownSignals(1)
    signals.begin_loop(tmp_path)
    signal.raise_signal(signal.SIGHUP)
    assert not signals.stop and not exit_codes


@pytest.mark.parametrize("ranks", [1, 2])
def test_signals_of_launched_ranks_wait_for_agreement_and_ignore_repeats(
    exit_codes, tmp_path, monkeypatch, capfd, ranks
):
    """A launcher forwards a signal that the rank got too, also one that started a single rank."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    signals, moment = ShutdownSignals(ranks), 100.0
    monkeypatch.setattr("time.monotonic", lambda: moment)
    signals.begin_loop(tmp_path)
    signal.raise_signal(signal.SIGTERM)
    moment += LAUNCHED_WINDOW
    signal.raise_signal(signal.SIGTERM)
    assert signals.received and signals.stop == (ranks == 1) and not exit_codes
    moment += 1  # that many seconds and one after the first, not after the last
    signal.raise_signal(signal.SIGTERM)
    assert exit_codes == [143]
    lines = capfd.readouterr().out.splitlines()
    again = f"a second signal after {LAUNCHED_WINDOW} s ends at once without a checkpoint"
    assert lines[0] == f"stopping after this step; {again}"
    assert lines[1].startswith("ended at once: ")


def test_borrowed_signals_of_several_ranks_ignore_repeats(exit_codes, tmp_path, monkeypatch):
    """A launcher forwards the signal that the process group got too: the save
    must not end in an exception.
    """
    moment, passed_on = 100.0, []
    signal.signal(signal.SIGTERM, lambda number, _: passed_on.append(number))
    monkeypatch.setattr("time.monotonic", lambda: moment)
    with BorrowedSignals(2) as signals:
        signals.begin_loop(tmp_path)
        signal.raise_signal(signal.SIGTERM)
        moment += LAUNCHED_WINDOW
        signal.raise_signal(signal.SIGTERM)
        assert signals.received and not passed_on
    assert passed_on == [signal.SIGTERM] and not exit_codes


@pytest.mark.slow
def test_train_saves_its_last_step_when_the_terminal_is_closed(tmp_path, request):
    """It receives SIGHUP, and from then on printing fails."""
    root = request.config.rootpath
    options = (
        "train.py configs/quickstart.yaml --model.n_layer 1 --model.n_head 1 --model.n_embd 64 "
        "--train.batch_size 1 --train.seq_len 16 --train.total_batch_tokens null "
        "--train.steps 100000 --eval.every 0 --sample.every 0 --run_dir"
    )
    command = [sys.executable, *options.split(), str(tmp_path)]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(root)
        os.environ.pop("TRITON_INTERPRET", None)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, command)
    printed = b""
    while b" 3/100000" not in printed:
        printed += os.read(terminal, 1024)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    state, _ = load_checkpoint(find_checkpoint(tmp_path))
    assert state["step"] >= 3
