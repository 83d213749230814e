"""Signals: the first ends a run after its step, the second at once; a launcher's repetition is not a second one."""

import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from gpt2_triton.checkpoint.load import find_checkpoint, load_checkpoint
from gpt2_triton.distributed.run_lock import RunLock, other_writer
from gpt2_triton.training.preemption import (
    LAUNCHED_WINDOW,
    PREEMPTED,
    REPEAT_WINDOW,
    BorrowedSignals,
    ShutdownSignals,
    TimeLimit,
)

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
def test_signals_on_one_rank_first_stops_second_exits(exit_codes, tmp_path, monkeypatch, capfd, number):
    """A repeat within a second is the same event: a shell and the kernel both send SIGHUP as a terminal is closed."""
    signals, moment = ShutdownSignals(1), 100.0
    monkeypatch.setattr("time.monotonic", lambda: moment)
    signals.run_dir = tmp_path
    signals.listen()
    assert not signals.stop
    signal.raise_signal(number)
    moment += REPEAT_WINDOW
    signal.raise_signal(number)
    assert signals.stop and signals.received == number and not exit_codes and not os.listdir(tmp_path)
    again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
    line = f"stopping after this step; {again} after 1 second ends at once without a checkpoint\n"
    assert capfd.readouterr().out == line
    moment += 0.5
    signal.raise_signal(signal.SIGINT)
    assert exit_codes == [130] and os.listdir(tmp_path) == [PREEMPTED]
    ended = "ended at once: steps since the last checkpoint are lost; the same command with --run_dir"
    assert capfd.readouterr().out == f"{ended} {tmp_path} --resume continues\n"


def test_signals_ignore_sighup_under_nohup(exit_codes):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = ShutdownSignals(1)
    signals.listen()
    signal.raise_signal(signal.SIGHUP)
    assert not signals.stop and not exit_codes


def test_signals_of_one_rank_that_torchrun_started_ignore_repeats(exit_codes, monkeypatch):
    """torchrun forwards a signal that SLURM sent to the rank too."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    moment = 100.0
    monkeypatch.setattr("time.monotonic", lambda: moment)
    ShutdownSignals(1).listen()
    signal.raise_signal(signal.SIGTERM)
    moment += LAUNCHED_WINDOW
    signal.raise_signal(signal.SIGTERM)
    assert not exit_codes


def test_signals_on_several_ranks_wait_for_agreement_and_ignore_repeats(exit_codes, monkeypatch, capfd):
    signals, moment = ShutdownSignals(2), 100.0
    monkeypatch.setattr("time.monotonic", lambda: moment)
    signals.listen()
    signal.raise_signal(signal.SIGTERM)
    moment += LAUNCHED_WINDOW
    signal.raise_signal(signal.SIGTERM)
    assert signals.received and not signals.stop and not exit_codes
    moment += 1  # that many seconds and one after the first, not after the last
    signal.raise_signal(signal.SIGTERM)
    assert exit_codes == [143]
    line = (
        f"stopping after this step; a second signal after {LAUNCHED_WINDOW} seconds ends at once without a checkpoint\n"
    )
    assert capfd.readouterr().out == line + "ended at once: steps since the last checkpoint are lost\n"


def test_borrowed_signals_of_several_ranks_ignore_repeats(exit_codes, monkeypatch):
    """A launcher forwards the signal that the process group got too: the save must not end in an exception."""
    moment, passed_on = 100.0, []
    signal.signal(signal.SIGTERM, lambda number, _: passed_on.append(number))
    monkeypatch.setattr("time.monotonic", lambda: moment)
    with BorrowedSignals(2) as signals:
        signals.listen()
        signal.raise_signal(signal.SIGTERM)
        moment += LAUNCHED_WINDOW
        signal.raise_signal(signal.SIGTERM)
        assert signals.received and not passed_on
    assert passed_on == [signal.SIGTERM] and not exit_codes


STARTING = """
import ctypes, signal, sys
from pathlib import Path
from gpt2_triton.training.preemption import ShutdownSignals
signals = ShutdownSignals(1)
signals.run_dir = Path(sys.argv[1]) / "run"
with signals.leaving_at_once():
    print("starting", flush=True)
    ctypes.PyDLL(None).sleep(1) if sys.argv[2] == "gil" else ctypes.CDLL(None).sleep(1000)
    signal.pause()
"""


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("waits", ["C", "gil"])
def test_signal_before_the_loop_marks_and_ends_the_process(tmp_path, request, number, waits):
    """The main thread is in C: without the lock of the interpreter, or for a second with it."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", STARTING, str(tmp_path), waits]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=request.config.rootpath, restore_signals=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout.readline() == "starting\n"
    process.send_signal(number)
    out, _ = process.communicate()
    assert process.returncode == 128 + number and (tmp_path / "run" / PREEMPTED).exists()
    assert out == f"stopped before the first step; the same command with --run_dir {tmp_path}/run --resume continues\n"


@pytest.fixture
def train_signalled_in_imports(tmp_path, request):
    """Start train.py with `--run_dir tmp_path/run` and more words; a stand-in for torch sends SIGTERM to the process,
    and its import never ends.  Return what the process has printed.
    """
    (tmp_path / "modules").mkdir()
    stand_in = "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)"
    (tmp_path / "modules" / "torch.py").write_text(stand_in)

    def start(*words, **env):
        command = [sys.executable, "train.py", "configs/quickstart.yaml", "--run_dir", str(tmp_path / "run"), *words]
        env = os.environ | {"PYTHONPATH": str(tmp_path / "modules")} | env
        ended = subprocess.run(command, cwd=request.config.rootpath, env=env, capture_output=True, text=True)
        assert ended.returncode == 143, ended.stderr
        return ended.stdout

    return start


@pytest.mark.parametrize("found", ["nothing", "a run", "a run that was killed"])
def test_train_that_is_signalled_while_it_imports_leaves_the_marker(tmp_path, train_signalled_in_imports, found):
    run_dir = tmp_path / "run"
    if found != "nothing":
        run_dir.mkdir()
        (run_dir / "config.yaml").touch()
    if found == "a run that was killed":
        killed = "import os, sys; from pathlib import Path; from gpt2_triton.distributed.run_lock import RunLock"
        killed += "; RunLock(Path(sys.argv[1])); os._exit(9)"
        subprocess.run([sys.executable, "-c", killed, str(run_dir)])
        assert (run_dir / ".lock").exists()
    out = train_signalled_in_imports("--resume")
    hint = f"the same command with --run_dir {run_dir} --resume continues"
    assert out.splitlines()[-1] == f"stopped before the first step; {hint}"
    assert (run_dir / PREEMPTED).exists()


def test_train_that_is_signalled_while_it_imports_leaves_another_run_alone(tmp_path, train_signalled_in_imports):
    with RunLock(tmp_path / "run"):
        out = train_signalled_in_imports("--resume")
        assert os.listdir(tmp_path / "run") == [".lock"]
    holder = f"pid {os.getpid()} on {socket.gethostname()}, started "
    assert out.splitlines()[-1].startswith(f"stopped before the first step; {holder}")
    assert out.endswith(f", writes to {tmp_path}/run, where this start leaves no {PREEMPTED}\n")


def test_train_that_is_signalled_while_it_imports_marks_on_rank_0_alone(tmp_path, train_signalled_in_imports):
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert train_signalled_in_imports("--resume", RANK="1", **ranks) == ""
    assert os.listdir(tmp_path) == ["modules"]
    assert "continues\n" in train_signalled_in_imports("--resume", RANK="0", **ranks | {"LOCAL_RANK": "0"})
    assert os.listdir(tmp_path / "run") == [PREEMPTED]


def test_signal_while_checkpoints_are_verified_leaves_the_marker(exit_codes, tmp_path, monkeypatch):
    """This process has locked the directory, and `signals` is told of it only afterwards."""
    moments = iter([90.0, 100.0, 102.0])
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    signals = ShutdownSignals(1)
    signals.run_dir = tmp_path
    signals.listen()
    with RunLock(tmp_path):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert exit_codes == [143] and sorted(os.listdir(tmp_path)) == [".lock", PREEMPTED]


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_marker_that_cannot_be_made_is_named(tmp_path, request, place):
    (tmp_path / "file").touch()
    program = STARTING.replace('"run"', repr(place)).replace("signal.pause()", "") + "\n"
    program = program.replace('print("starting", flush=True)', "signal.raise_signal(signal.SIGTERM)")
    command = [sys.executable, "-c", program, str(tmp_path), "C"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=request.config.rootpath)
    line = f"stopped before the first step; cannot make {tmp_path}/{place}/PREEMPTED: Not a directory\n"
    assert ended.returncode == 143 and ended.stdout == line


def test_leaving_at_once_restores_the_handlers():
    before = [signal.getsignal(number) for number in STOPPING]
    with ShutdownSignals(1).leaving_at_once():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in STOPPING] == before and signal.set_wakeup_fd(-1) == -1


def test_signals_are_not_installed_outside_the_main_thread(exit_codes):
    before, signals, seen = signal.getsignal(signal.SIGTERM), ShutdownSignals(1), []

    def train():
        with signals.leaving_at_once():
            signals.begin_loop()
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before]


def test_time_limit_leaves_time_for_two_steps_and_two_saves(monkeypatch):
    moments = iter([100.0, 103.0, 105.0, 110.0, 115.0, 120.0, 125.0])
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    limit = TimeLimit(1.0, began=90.0)  # ends at 150
    seen = [limit.is_near(saving=10.0) for _ in range(6)]  # the longest step takes 5 s: two and two saves 30 s
    assert seen == [False, False, False, False, False, True]


def test_time_limit_of_0_is_none():
    assert not TimeLimit(0, began=-1e9).is_near(1e9)


@pytest.mark.parametrize("parent", ["none", "bash"])
def test_train_saves_its_last_step_when_the_terminal_is_closed(tmp_path, request, parent):
    """It receives SIGHUP, from an interactive shell perhaps twice, and from then on printing fails."""
    root = request.config.rootpath
    small = "--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --train.batch_size 1 --train.seq_len 16"
    options = f"{small} --train.total_batch_tokens null --train.steps 100000 --eval.every 0 --sample.every 0"
    command = [sys.executable, "train.py", "configs/quickstart.yaml", *options.split(), "--run_dir", str(tmp_path)]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(root)
        os.environ.pop("TRITON_INTERPRET", None)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if parent == "none":
            os.execv(sys.executable, command)
        os.execvp("bash", ["bash", "--norc", "-i"])
    if parent == "bash":
        os.write(terminal, f"{shlex.join(command)}\n".encode())
    printed = b""
    while b" 3/100000" not in printed:
        printed += os.read(terminal, 1024)
    os.close(terminal)
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if parent == "none":
        assert ended == 128 + signal.SIGHUP
    while other_writer(tmp_path):  # the shell does not wait for it
        time.sleep(0.1)
    state, _ = load_checkpoint(find_checkpoint(tmp_path))
    assert state["step"] >= 3
