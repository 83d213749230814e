"""Signals: the first ends a run after its step, the second at once; a launcher's repetition is not a second one."""

import os
import pty
import signal
import sys

import pytest

from gpt2_triton.checkpoint.load import find_checkpoint, load_checkpoint
from gpt2_triton.training.preemption import REPEAT_WINDOW, ShutdownSignals

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def exit_codes(monkeypatch):
    """Exit codes with which the process would have ended at once; the handlers are restored afterwards."""
    codes, handlers = [], {number: signal.getsignal(number) for number in STOPPING}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as where nohup did not start the tests
    monkeypatch.setattr(os, "_exit", codes.append)
    yield codes
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING)
def test_signals_on_one_rank_first_stops_second_exits(exit_codes, number):
    signals = ShutdownSignals(1)
    signals.listen()
    assert not signals.stop
    signal.raise_signal(number)
    assert signals.stop and signals.exit_code == 128 + number and not exit_codes
    signal.raise_signal(signal.SIGINT)
    assert exit_codes == [130]


def test_signals_ignore_sighup_under_nohup(exit_codes):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = ShutdownSignals(1)
    signals.listen()
    signal.raise_signal(signal.SIGHUP)
    assert not signals.stop and not exit_codes


def test_signals_on_several_ranks_wait_for_agreement_and_ignore_repeats(exit_codes, monkeypatch):
    signals, moment = ShutdownSignals(2), 100.0
    monkeypatch.setattr("time.monotonic", lambda: moment)
    signals.listen()
    signal.raise_signal(signal.SIGTERM)
    moment += REPEAT_WINDOW
    signal.raise_signal(signal.SIGTERM)
    assert signals.received and not signals.stop and not exit_codes
    moment += REPEAT_WINDOW + 1
    signal.raise_signal(signal.SIGTERM)
    assert exit_codes == [143]


def test_signals_on_a_rank_without_one_stop_with_the_code_of_sigterm():
    signals = ShutdownSignals(2)
    signals.all_ranks_agree = True
    assert signals.stop and signals.exit_code == 143


def test_train_saves_its_last_step_when_the_terminal_is_closed(tmp_path, request):
    """It receives SIGHUP, and from then on printing fails."""
    root = request.config.rootpath
    small = "--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --train.batch_size 1 --train.seq_len 16"
    options = f"{small} --train.total_batch_tokens null --train.steps 100000 --eval.every 0 --sample.every 0"
    command = [sys.executable, "train.py", "configs/quickstart.yaml", *options.split(), "--run_dir", str(tmp_path)]
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
