"""Watchdog: each rank publishes its progress once a second.  If no rank makes progress within the timeout, the job ends
with a message that names the rank at fault.

    main thread   heartbeat(step) before each micro-step; `with phase(name)` around work that takes longer
    saver         saving(what, bytes) while it writes a checkpoint: progress of a rank that waits for it
    watchdog      every interval: set watchdog/RANK = State(tick, beats, step, phase, ...) in the store
                  no progress of this rank for the timeout: read all states; nothing more unless
                      no rank has made progress for the timeout times the factor of the slowest phase of all ranks
                      or a rank has published nothing for the timeout, whatever the phase
                  wait 5 intervals, read all states again; ranks whose tick stands still are silent
                  the first rank that comes here prints `diagnose`; all exit with 1

NCCL's own timeout sees neither collectives in a CUDA graph nor a suspended host, and its message names no rank.

A rank that waits for the device handles no signals, because Python runs handlers in the main thread only.  So when a
rank has died and the launcher sends SIGTERM to the others, the watchdog's thread ends them.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpt2_triton.console import print_line
from gpt2_triton.distributed.process_group import ProcessGroup

STARTING, STEPPING, SAVING = "starting", "training", "saving"
SEARCHING = "searching for non-finite numbers"
TIMEOUT_FACTORS = {STARTING: 3, STEPPING: 1, SAVING: 3}  # of the timeout, by phase
SLOW_PHASE_FACTOR = 10  # every other phase, without heartbeats inside: validating, sampling, ...
DEAD_AFTER = 10  # intervals without a new tick after which a rank counts as dead, once the launcher has sent SIGTERM


class State(NamedTuple):
    """A rank's state, as it is in the store."""

    tick: int  # states published
    beats: int  # heartbeats
    step: int
    phase: str
    save: str = ""  # what the rank does for a checkpoint; empty unless it waits for that
    saved: int = 0  # bytes of checkpoints written

    @property
    def progress(self) -> tuple[int, int]:
        return self.beats, self.saved if self.phase == SAVING else 0


def diagnose(states: Sequence[State], silent: Sequence[int]) -> str:
    """Return which ranks are at fault: the silent ones, else those with the fewest heartbeats, else none."""
    fewest = min(state.beats for state in states)
    behind = [rank for rank, state in enumerate(states) if state.beats == fewest]
    if silent:
        return f"{_ranks_are(silent)} not responding"
    if len(behind) == len(states):  # of ranks that save, those that wait for others' files are not at fault
        behind = [rank for rank, state in enumerate(states) if not state.save.startswith("waiting")]
    if len(behind) in (0, len(states)):
        return "all ranks are at the same point: the network, or a GPU"
    first = states[behind[0]]
    return f"{_ranks_are(behind)} behind the others, {first.save or first.phase} at step {first.step}"


def _ranks_are(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


class Watchdog:
    """Publishes this rank's heartbeats and checks the others'.  Does nothing on a single rank."""

    def __init__(self, group: ProcessGroup, timeout: float):
        self.group, self._timeout, self._interval = group, timeout, min(1.0, timeout / 20)
        self._tick, self._beats, self._step, self._phase = 0, 0, 0, STARTING
        self._save, self._saved = "", 0
        self._last_progress, self._signalled, self._closed = time.monotonic(), False, False
        # while this rank stands still: each rank's last state and when it was published; when one made progress
        self._seen: list[tuple[State, float]] = []
        self._progress_elsewhere = 0.0
        if group.size > 1:
            self._signals, self._write_end = os.pipe()
            os.set_blocking(self._signals, False)
            os.set_blocking(self._write_end, False)
            self._next_pipe = -1
            self._listens = threading.current_thread() is threading.main_thread()
            if self._listens:
                self._next_pipe = signal.set_wakeup_fd(self._write_end)
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def heartbeat(self, step: int) -> None:
        """Record progress; `step` is the number of the step under way."""
        self._step, self._beats, self._last_progress = step, self._beats + 1, time.monotonic()

    def saving(self, what: str, nbytes: int) -> None:
        """Record what this rank's saver does, "waiting ..." if it needs other ranks, and the bytes it has written:
        progress, if this rank waits for it.
        """
        self._save, self._saved = what, self._saved + nbytes
        if self._phase == SAVING:
            self._last_progress = time.monotonic()

    def end_startup(self) -> None:
        """Give later steps the plain timeout: after the first step nothing is left to compile."""
        self._phase = STEPPING

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Allow the timeout times the phase's factor inside."""
        before, self._phase = self._phase, name
        self.heartbeat(self._step)
        try:
            yield
        finally:
            self._phase = before
            self.heartbeat(self._step)

    def stop(self) -> None:
        """End the thread, which closes its pipe, and put back the pipe that signals were written to before."""
        if self.group.size > 1 and self._listens and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(ValueError, OSError):  # that pipe may be closed by now
                signal.set_wakeup_fd(-1)
                signal.set_wakeup_fd(self._next_pipe)
            self._listens = False
        self._closed = True

    def _run(self) -> None:
        try:
            self._loop()
            if not self._listens:
                os.close(self._signals)
                os.close(self._write_end)
        except RuntimeError:  # the store is gone, and with it the process that holds it
            time.sleep(5 * self._interval)  # meanwhile collectives outside CUDA graphs raise a better error
            if not self._closed:
                lost = "rank 0 or the launcher has exited; restart the job, with --resume"
                print_line(f"error: rank {self.group.rank}: {lost}", error=True)
                os._exit(1)

    def _loop(self) -> None:
        while not self._closed:
            self._publish()
            if not self._closed and self._received_signal():
                self._exit_if_a_rank_died()
            if time.monotonic() - self._last_progress > self._timeout:
                self._check_progress()
            else:
                self._seen = []

    def _publish(self) -> None:
        self._tick += 1
        save = self._save if self._phase == SAVING else ""
        state = State(self._tick, self._beats, self._step, self._phase, save, self._saved)
        self.group.store.set(f"watchdog/{self.group.rank}", json.dumps(state))
        time.sleep(self._interval)

    def _read_all(self) -> list[State]:
        store, keys = self.group.store, [f"watchdog/{rank}" for rank in range(self.group.size)]
        return [State(*json.loads(store.get(k))) if store.check([k]) else State(0, 0, 0, STARTING) for k in keys]

    def _received_signal(self) -> bool:
        with contextlib.suppress(OSError):  # nothing to read
            numbers = os.read(self._signals, 64)
            self._signalled = True
            if self._next_pipe >= 0:
                os.write(self._next_pipe, numbers)
        return self._signalled

    def _exit_if_a_rank_died(self) -> None:
        """Exit after a signal if a rank is dead: then no step can be finished and no checkpoint saved."""
        earlier = self._read_all()
        for _ in range(DEAD_AFTER):
            self._publish()
        if not self._closed and _silent(earlier, self._read_all()):
            os._exit(128 + signal.SIGTERM)

    def _check_progress(self) -> None:
        earlier = self._read_all()
        factor = max(TIMEOUT_FACTORS.get(state.phase, SLOW_PHASE_FACTOR) for state in earlier)
        silence = self._longest_silence(earlier)
        last_progress = max(self._last_progress, self._progress_elsewhere)
        is_stalled = time.monotonic() - last_progress >= self._timeout * factor
        if not is_stalled and silence < self._timeout:
            return
        for _ in range(5):
            self._publish()  # so that the others do not count this rank as silent
        later = self._read_all()
        silent = [rank for rank in _silent(earlier, later) if rank != self.group.rank]
        if is_stalled or silent:
            self._report_and_exit(diagnose(later, silent))

    def _longest_silence(self, states: Sequence[State]) -> float:
        """Return the longest time for which a rank has published nothing; record the other ranks' progress."""
        now = time.monotonic()
        if not self._seen:
            self._seen, self._progress_elsewhere = [(state, now) for state in states], 0.0
        if any(before.progress != state.progress for (before, _), state in zip(self._seen, states, strict=True)):
            self._progress_elsewhere = now
        self._seen = [
            (state, since if state.tick == before.tick else now)
            for (before, since), state in zip(self._seen, states, strict=True)
        ]
        return now - min(since for _, since in self._seen)

    def _report_and_exit(self, diagnosis: str) -> None:
        if self.group.store.add("watchdog/reported", 1) == 1:
            waited = f"no progress for {time.monotonic() - self._last_progress:.0f} s at step {self._step}"
            todo = "restart the job, with --resume"
            print_line(f"error: rank {self.group.rank}: {waited}: {diagnosis}; {todo}", error=True)
        else:
            time.sleep(2 * self._interval)  # the launcher ends all ranks with the first: let the other one report
        os._exit(1)


def _silent(earlier: Sequence[State], later: Sequence[State]) -> list[int]:
    """Return the ranks that have published nothing in between."""
    return [rank for rank, (a, b) in enumerate(zip(earlier, later, strict=True)) if a.tick == b.tick]
