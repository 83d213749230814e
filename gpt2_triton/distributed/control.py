"""What the hosts of a run tell each other: values through a key-value store, in an order that all ranks share.

The store is that of torch.distributed (set, check, get, delete_key).  No kernel waits for it, and any thread may use
it: it is asked again and again whether a key is there, since a blocking question would hold up the other threads'.
"""

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from gpt2_triton.errors import PeerLostError

POLL = 0.02  # seconds between two looks at the store


class ControlGroup:
    """Values that all ranks exchange in the same order; JSON, so that numbers arrive as they are."""

    def __init__(self, name: str, rank: int = 0, size: int = 1, store: Any = None):
        self.rank, self.size = rank, size
        self._name, self._store, self._calls = name, store, 0

    def all_gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank, on every rank; PeerLostError if the store is gone, with rank 0 or the launcher."""
        if self.size == 1:
            return [value]
        try:
            return self._exchange(value)
        except RuntimeError as error:
            raise PeerLostError("rank 0, or the launcher, has ended: its message says why") from error

    def _exchange(self, value: Any) -> list[Any]:
        self._calls += 1
        key = f"{self._name}/{self._calls}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank != 0:
            return self._wait(key)
        values = [self._take(f"{key}/{rank}") for rank in range(self.size)]
        self._store.set(key, json.dumps(values))
        if self._calls > 1:  # every rank has read the list before, or it would not have come to this one
            self._store.delete_key(f"{self._name}/{self._calls - 1}")
        return values

    def from_rank0(self, function: Callable[[], Any]) -> Any:
        """What rank 0 gets from `function`, on every rank; its OSError is raised on every rank."""
        result: dict[str, Any] = {}
        error: OSError | None = None
        if self.rank == 0:
            try:
                result["value"] = function()
            except OSError as raised:
                error, result["errno"], result["error"] = raised, raised.errno, str(raised)
        found = self.all_gather(result)[0]
        if "error" in found:
            raise error or OSError(found["errno"], found["error"])
        return found["value"]

    def _wait(self, key: str) -> Any:
        while not self._store.check([key]):
            time.sleep(POLL)
        return json.loads(self._store.get(key))

    def _take(self, key: str) -> Any:
        value = self._wait(key)
        self._store.delete_key(key)
        return value


SINGLE_PROCESS = ControlGroup("alone")


def agree_on_session(store: Any, rank: int, size: int, seconds: float) -> str:
    """A name that all ranks of this start share, and no start before had; TimeoutError, on rank 0 with the ranks that
    are missing, after so many seconds.

    torchrun gives ranks that it starts again the store of those before, keys and all, and no number that all nodes
    agree on.  So each rank draws a word: rank 0's is the name, and whoever gets it back with its own knows it as new.
    """
    word, end = secrets.token_hex(8), time.monotonic() + seconds
    store.set(f"word/{rank}", json.dumps(word))
    waiting = set(range(1, size)) if rank == 0 else {0}
    while True:
        for other in tuple(waiting):
            if rank == 0 and _read(store, f"agreed/{other}") == word:
                waiting.remove(other)
            elif rank == 0:
                store.set(f"answer/{other}", json.dumps([_read(store, f"word/{other}"), word]))
            elif (found := _read(store, f"answer/{rank}")) and found[0] == word:
                store.set(f"agreed/{rank}", json.dumps(found[1]))
                return found[1]
        if not waiting:
            return word
        if time.monotonic() > end:
            missing = "rank 0" if rank else f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, sorted(waiting)))}"
            raise TimeoutError(f"{missing} did not join within {seconds:.0f} s")
        time.sleep(POLL)


def _read(store: Any, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None
