"""Who hangs: every rank tells the others once a second where it is, and ends the job when nothing moves any more.

NCCL's own timeout sees neither collectives that a CUDA graph replays nor a host that sleeps, and does not know what it
waits for.  Here a thread of each rank compares: of ranks that wait for each other, the one that has done least is at
fault, or the one that no longer answers.

A rank that waits on the device hears no signal either: Python's handlers run between two lines of the main thread.  So
when a rank has died and the launcher tells the others to stop, it is this thread that does.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from gpt2_triton.distributed.process_group import ProcessGroup

STARTING, STEPPING = "starting", "training"
PATIENCE = {STARTING: 3, STEPPING: 1}  # times the timeout; evaluations, samples and checkpoints have OTHER
OTHER = 10
SILENT = 10  # intervals, seconds as a rule, after which a rank that says nothing is taken for dead


class Watchdog:
    """This rank's watchdog, and its ear for those of the others; a rank alone has none."""

    def __init__(self, group: ProcessGroup, timeout: float):
        self.group, self._timeout, self._interval = group, timeout, min(1.0, timeout / 20)
        self._step, self._done, self._phase, self._tick = 0, 0, STARTING, 0
        self._moved, self._over, self._told = time.monotonic(), False, False
        if group.size > 1:
            self._signals, heard = os.pipe()
            os.set_blocking(self._signals, False)
            os.set_blocking(heard, False)
            signal.set_wakeup_fd(heard)
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def heartbeat(self, step: int) -> None:
        """Something was done for `step`, the number of the step that is being made."""
        self._step, self._done, self._moved = step, self._done + 1, time.monotonic()

    def end_startup(self) -> None:
        """The first step is over: from here on a step has the timeout, and no compiler to wait for."""
        self._phase = STEPPING

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Something that other ranks may have to wait for longer than for a step."""
        before, self._phase = self._phase, phase
        self.heartbeat(self._step)
        try:
            yield
        finally:
            self._phase = before
            self.heartbeat(self._step)

    def stop(self) -> None:
        """The run is over."""
        self._over = True

    def _run(self) -> None:
        try:
            self._watch()
        except RuntimeError:  # the store is gone, and with it the process that has it
            time.sleep(5 * self._interval)  # collectives outside of CUDA graphs tell of it themselves
            if not self._over:
                lost = "the first rank, or the launcher, has ended; restart the job, with --resume"
                print(f"error: rank {self.group.rank}: {lost}", file=sys.stderr, flush=True)
                os._exit(1)

    def _watch(self) -> None:
        while not self._over:
            self._publish()
            if self._signalled():
                self._leave_the_dead()
            if time.monotonic() - self._moved > self._timeout:
                self._look_around()

    def _publish(self) -> None:
        self._tick += 1
        state = (self._tick, self._done, self._step, self._phase)
        self.group.store.set(f"watchdog/{self.group.rank}", json.dumps(state))
        time.sleep(self._interval)

    def _signalled(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._told = self._told or bool(os.read(self._signals, 1))
        return self._told

    def _leave_the_dead(self) -> None:
        """All were told to stop; with a rank that has died there is no step to finish, and no checkpoint to make."""
        earlier = self._others()
        for _ in range(SILENT):
            self._publish()
        if not self._over and any(now[0] == then[0] for now, then in zip(self._others(), earlier, strict=True)):
            os._exit(128 + signal.SIGTERM)

    def _look_around(self) -> None:
        earlier = self._others()
        if time.monotonic() - self._moved < self._timeout * max(PATIENCE.get(s[3], OTHER) for s in earlier):
            return
        still = [rank for rank, state in enumerate(earlier) if rank != self.group.rank]
        for _ in range(5):  # this thread says meanwhile that this rank is alive
            self._publish()
        later = self._others()
        silent = [rank for rank in still if later[rank][0] == earlier[rank][0]]
        self._end(silent, later)

    def _others(self) -> list[list[Any]]:
        store, keys = self.group.store, [f"watchdog/{rank}" for rank in range(self.group.size)]
        return [json.loads(store.get(key)) if store.check([key]) else [0, 0, 0, STARTING] for key in keys]

    def _end(self, silent: list[int], states: list[list[Any]]) -> None:
        """Say who hangs, the rank that finds out first for all, and leave; the launcher ends the others."""
        least = min(state[1] for state in states)
        behind = [rank for rank, state in enumerate(states) if state[1] == least]
        if silent:
            what = f"{_ranks(silent)} no longer answering"
        elif len(behind) < len(states):
            what = f"{_ranks(behind)} behind the others, {states[behind[0]][3]} at step {states[behind[0]][2]}"
        else:
            what = "all ranks at the same point: the network, or a GPU"
        if self.group.store.add("watchdog/ended", 1) == 1:
            waited = time.monotonic() - self._moved
            message = f"error: rank {self.group.rank}: nothing moved for {waited:.0f} s at step {self._step}: {what}"
            print(f"{message}; restart the job, with --resume", file=sys.stderr, flush=True)
        else:
            time.sleep(2 * self._interval)  # let it speak before the launcher sees that a rank has ended
        os._exit(1)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
