"""Watchdog: each rank publishes its progress once a second.  If no rank makes progress within the
timeout, the job ends with a message that names the rank at fault.

    main thread   heartbeat(step) before each micro-step; `with phase(name)` around work that
                  takes longer
    watchdog      every interval: set watchdog/RANK = Status(tick, beats, step, phase) in the store
                  after a timeout without progress of this rank: watch all ranks, and report if
                  - no rank makes progress for timeout * the largest factor of the ranks' phases
                  - a rank publishes nothing for one timeout, in any phase
                  the first rank to report prints `diagnose`; every rank exits with 1

NCCL's own timeout sees neither collectives in a CUDA graph nor a suspended host,
and its message names no rank.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpt2_triton.console import print_line
from gpt2_triton.distributed.process_group import ProcessGroup

STARTING = "starting"
STEPPING = "training"
SAVING = "saving"
SEARCHING = "searching for non-finite numbers"
TIMEOUT_FACTORS = {STARTING: 3, STEPPING: 1}  # number of timeouts that a phase may take
SLOW_PHASE_FACTOR = 10  # for all other phases (saving, ...), which send no heartbeats
SILENT_AFTER = 5  # a rank is silent after this many intervals without a new tick


class Status(NamedTuple):
    """A rank's state in the store."""

    tick: int  # states published
    beats: int  # heartbeats
    step: int
    phase: str


def diagnose(states: Sequence[Status], silent: Sequence[int]) -> str:
    """Return in words which ranks are at fault: silent ranks, else ranks with
    fewer heartbeats than others.
    """
    fewest = min(state.beats for state in states)
    behind = [rank for rank, state in enumerate(states) if state.beats == fewest]
    if silent:
        return f"{_ranks_are(silent)} not responding"
    if len(behind) == len(states):
        return "all ranks are at the same point: the network, or a GPU"
    first = states[behind[0]]
    return f"{_ranks_are(behind)} behind the others, {first.phase} at step {first.step}"


def _ranks_are(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


class _Watch:
    """The states of all ranks while this rank makes no progress, and the
    times when the states changed.
    """

    def __init__(self, states: Sequence[Status], now: float):
        self.states = states
        self.began = now
        self.last_progress = 0.0
        self.last_ticks = [now] * len(states)

    def update(self, states: Sequence[Status], now: float) -> None:
        """Take new states; `now` is in seconds, of time.monotonic."""
        for rank, (before, state) in enumerate(zip(self.states, states, strict=True)):
            if state.tick != before.tick:
                self.last_ticks[rank] = now
            if state.beats != before.beats:
                self.last_progress = now
        self.states = states

    def silent(self, since: float) -> list[int]:
        """Return the ranks that have published nothing after the time `since`."""
        return [rank for rank, tick in enumerate(self.last_ticks) if tick <= since]


class Watchdog:
    """Publishes this rank's heartbeats and checks the others'.  Does nothing on a single rank."""

    def __init__(self, group: ProcessGroup, timeout: float):
        self.group = group
        self._timeout = timeout
        self._interval = min(1.0, timeout / 20)
        self._tick = self._beats = self._step = 0
        self._phase = STARTING
        self._last_progress = time.monotonic()
        self._closed = False
        self._watch: _Watch | None = None
        if group.size > 1:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def heartbeat(self, step: int) -> None:
        """Record progress; `step` is the number of the step under way."""
        self._step = step
        self._beats += 1
        self._last_progress = time.monotonic()

    def end_startup(self) -> None:
        """Give later steps one timeout each: after the first step nothing is left to compile."""
        self._phase = STEPPING

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Let the block take as many timeouts as the phase may."""
        before = self._phase
        self._phase = name
        self.heartbeat(self._step)
        try:
            yield
        finally:
            self._phase = before
            self.heartbeat(self._step)

    def stop(self) -> None:
        """End the watch of this rank."""
        self._closed = True

    def _run(self) -> None:
        try:
            while not self._closed:
                self._publish()
                if not self._closed:
                    self._check()
        except RuntimeError:  # the process that holds the store has exited
            # meanwhile collectives outside CUDA graphs raise a better error
            time.sleep(5 * self._interval)
            if not self._closed:
                print_line(
                    f"error: rank {self.group.rank}: rank 0 or the launcher has exited; "
                    "restart the job, with --resume",
                    error=True,
                )
                os._exit(1)

    def _publish(self) -> None:
        """Put this rank's state into the store, and wait for an interval."""
        self._tick += 1
        state = Status(self._tick, self._beats, self._step, self._phase)
        self.group.store.set(f"watchdog/{self.group.rank}", json.dumps(state))
        time.sleep(self._interval)

    def _read_all(self) -> list[Status]:
        store = self.group.store
        keys = [f"watchdog/{rank}" for rank in range(self.group.size)]
        return [
            Status(*json.loads(store.get(k))) if store.check([k]) else Status(0, 0, 0, STARTING)
            for k in keys
        ]

    def _check(self) -> None:
        """Watch all ranks; end the process if one is silent, or if all stand still."""
        now = time.monotonic()
        if now - self._last_progress <= self._timeout:
            self._watch = None
            return
        states = self._read_all()
        watch = self._watch or _Watch(states, now)
        self._watch = watch
        watch.update(states, now)
        factor = max(TIMEOUT_FACTORS.get(state.phase, SLOW_PHASE_FACTOR) for state in states)
        silent = watch.silent(now - SILENT_AFTER * self._interval)
        is_stalled = now - max(self._last_progress, watch.last_progress) >= self._timeout * factor
        has_watched = now - watch.began >= SILENT_AFTER * self._interval
        if (is_stalled and has_watched) or watch.silent(now - self._timeout):
            self._report_and_exit(diagnose(states, silent))

    def _report_and_exit(self, diagnosis: str) -> None:
        reports = self.group.store.add("watchdog/reported", 1)
        if reports == 1:
            seconds = time.monotonic() - self._last_progress
            print_line(
                f"error: rank {self.group.rank}: no progress for {seconds:.0f} s at step "
                f"{self._step}: {diagnosis}; restart the job, with --resume",
                error=True,
            )
        else:
            # the first exit makes the launcher end all ranks: let another report first
            time.sleep(2 * self._interval)
        os._exit(1)
