"""Object collectives over the key-value store of torch.distributed (set, check, get, delete_key).

All ranks must call the functions of one group in the same order.  No GPU takes part, and any
thread may use a group.  Ranks poll the store for a key, because a blocking `get` would stop
the process's other threads.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from gpt2_triton import errors
from gpt2_triton.errors import ConfigError, PeerLostError, UserError

POLL_SECONDS = 0.02


class ControlGroup:
    """Exchanges values between ranks as JSON.  Numbers arrive unchanged."""

    def __init__(self, name: str, rank: int = 0, size: int = 1, store: Any = None):
        self.rank = rank
        self.size = size
        self._name = name
        self._store = store
        self._calls = 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank; PeerLostError if the process that
        holds the store has exited.
        """
        if self.size == 1:
            return [value]
        try:
            return self._exchange(value)
        except RuntimeError as error:
            raise PeerLostError("rank 0 or the launcher has exited; see its log") from error

    def _exchange(self, value: Any) -> list[Any]:
        self._calls += 1
        key = f"{self._name}/{self._calls}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank != 0:
            return self._wait(key)
        values = [self._take(f"{key}/{rank}") for rank in range(self.size)]
        self._store.set(key, json.dumps(values))
        # every rank has sent its next value, so every rank has read the last list
        if self._calls > 1:
            self._store.delete_key(f"{self._name}/{self._calls - 1}")
        return values

    def differing(self, value: Any) -> list[int]:
        """Return the ranks whose value is not rank 0's."""
        found = self.all_gather(value)
        return [rank for rank, value in enumerate(found) if value != found[0]]

    def require_equal(self, **values: Any) -> None:
        """Raise ConfigError, naming the ranks, if a JSON value differs from rank 0's value.

        Without this check a node with an older configuration or a missing shard
        would train without an error.
        """
        for what, value in values.items():
            text = json.dumps(value, sort_keys=True)
            others = self.differing(hashlib.sha256(text.encode()).hexdigest())
            if others:
                self.leave()
                raise ConfigError(
                    f"{what}: not the same on ranks {others} as on rank 0; "
                    "copy the same files to every node"
                )

    def from_rank0(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank 0.  Return its result, or raise its OSError or
        UserError, on every rank.
        """
        result: dict[str, Any] = {}
        error: OSError | UserError | None = None
        if self.rank == 0:
            try:
                result["value"] = function()
            except OSError as raised:
                error = raised
                reason = raised.strerror or str(raised)
                file = raised.filename and str(raised.filename)
                result["of_system"] = raised.errno, reason, file
            except UserError as raised:
                error = raised
                result |= {"class": type(raised).__name__, "error": str(raised)}
        found = self.all_gather(result)[0]
        if "class" in found:
            self.leave()
            raise error or getattr(errors, found["class"])(found["error"])
        if "of_system" in found:
            raise error or OSError(*found["of_system"])
        return found["value"]

    def leave(self) -> None:
        """Make rank 0, which may hold the store, wait for the others; all call it
        before an exit with an error.
        """
        if self.rank > 0:
            self._store.set(f"{self._name}/left/{self.rank}", "null")
            return
        for rank in range(1, self.size):
            self._take(f"{self._name}/left/{rank}")

    def _wait(self, key: str) -> Any:
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        return json.loads(self._store.get(key))

    def _take(self, key: str) -> Any:
        value = self._wait(key)
        self._store.delete_key(key)
        return value


SINGLE_PROCESS = ControlGroup("single")


def agree_on_session(store: Any, rank: int, size: int, seconds: float) -> str:
    """Return a name that all ranks of this start share, and that no earlier start had.

    torchrun gives restarted ranks the old store with its old keys, and no start number common to
    all nodes.  So each rank draws a random token, and rank 0's token is the name.  Other ranks
    accept only a session that lists their own:

        rank 0   repeat session = [T_0, token/1, ..., token/N] until
                 every accept/r is T_0; return T_0
        rank r   set token/r = T_r; wait until session has T_r; set accept/r =
                 session[0]; return session[0]

    Raise TimeoutError after `seconds`; on rank 0 the error names the missing ranks.
    """
    token = secrets.token_hex(8)
    end = time.monotonic() + seconds
    others = range(1, size)
    missing = [0]
    if rank:
        store.set(f"token/{rank}", json.dumps(token))
    while time.monotonic() < end:
        if rank == 0:
            theirs = [_read(store, f"token/{other}") for other in others]
            store.set("session", json.dumps([token, *theirs]))
            missing = [other for other in others if _read(store, f"accept/{other}") != token]
            if not missing:
                return token
        else:
            session = _read(store, "session") or []
            if token in session:
                store.set(f"accept/{rank}", json.dumps(session[0]))
                return session[0]
        time.sleep(POLL_SECONDS)
    names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    raise TimeoutError(f"{names} did not join within {seconds:.0f} s")


def _read(store: Any, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None
