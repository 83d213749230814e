"""Calls of a real step's launchers, stopped at: which rows they ask for; each again and again, compared and timed.

What a call writes is saved, and put back, so that the step goes on as if nothing had happened.
"""

import contextlib
import dataclasses
import gc
import inspect
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.errors import TritonError

import gpt2_triton.kernels as kernels
from benchmarks.ceilings import AHEAD, events
from benchmarks.our_gpt2 import run_steps
from benchmarks.sizes import SIZES, VOCAB, T, config_of
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.tuning import Key, Row
from gpt2_triton.model.cuda import capture
from gpt2_triton.model.gpt2 import GPT2

REFUSED = (TritonError, RuntimeError, ValueError, AssertionError)  # by the compiler, the driver or the launcher
DIFFERS = "its numbers differ from the current row's"
SAMPLE_MS = 1.0  # a graph holds so many launches as take this long: events resolve about a microsecond
BLOCK, CHUNK = 256, 1 << 24  # numbers compared as one, and at a time


class Rows(dict[Key, Row]):
    """A table's rows that remember which were asked for."""

    asked: set[Key]

    def __getitem__(self, key: Key) -> Row:
        self.asked.add(key)
        return super().__getitem__(key)


@contextlib.contextmanager
def asked_rows() -> Iterator[Rows]:
    """Inside, launchers take their rows from what this yields, a copy of the table's."""
    table = tuning.table
    rows = Rows(table().rows)
    rows.asked = set()
    replaced = table()._replace(rows=rows)
    tuning.table = lambda: replaced
    try:
        yield rows
    finally:
        tuning.table = table


@dataclasses.dataclass
class Call:
    """A launcher with its arguments, and the rows that it asks for."""

    launcher: Callable[..., None]
    args: tuple
    keywords: dict[str, Any]
    asked: set[Key] = dataclasses.field(default_factory=set)

    def __call__(self) -> None:
        self.launcher(*self.args, **self.keywords)

    def __str__(self) -> str:
        shape = next(value.shape for value in self.args if isinstance(value, Tensor))
        return f"{self.launcher.__name__} {'x'.join(map(str, shape))}"

    @property
    def key(self) -> str:
        """Equal for calls that take the same time: launcher, shapes and flags, but no numbers."""
        parts = [
            "x".join(map(str, v.shape)) if isinstance(v, Tensor) else str(v) if v is None or type(v) is bool else "."
            for v in (*self.args, *self.keywords.values())
        ]
        return " ".join([self.launcher.__name__, *parts])


class Stopping:
    """The kernel package.  It notes which rows each call asks for; with on_call set, it stops there before the launch
    of every call that no other before had the key of.
    """

    def __init__(self, rows: Rows):
        self.rows = rows
        self.on_call: Callable[[Call], None] | None = None
        self.asked: dict[str, set[Key]] = {}
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        launcher = getattr(kernels, name)
        if not hasattr(launcher, "outputs"):
            return launcher

        def launch(*args: Any, **keywords: Any) -> None:
            call = Call(launcher, args, keywords)
            if self.on_call is not None and call.key not in self.seen:
                self.seen.add(call.key)
                call.asked = self.asked[call.key]
                self.on_call(call)
            self.rows.asked.clear()
            call()
            self.asked[call.key] = set(self.rows.asked)

        return launch


def stopped_step(size: str, batch: int | None, rows: Rows, on_call: Callable[[Call, float], None]) -> None:
    """Run two steps of the size with one layer: the first shows its calls and the rows they ask for, the second stops
    before each with on_call(call, share of the calls that are done).
    """
    K = Stopping(rows)
    model, packed = model_of(config_of(size, batch or SIZES[size].batch, SIZES[size].recompute, n_layer=1), K)
    K.asked = {}
    list(run_steps(model, packed, range(1)))
    K.on_call = lambda call: on_call(call, len(K.seen) / (len(K.asked) + 1))
    list(run_steps(model, packed, range(1, 2)))
    K.on_call = None
    del model
    gc.collect()  # the arena goes before the next one comes
    torch.cuda.empty_cache()


def model_of(config: Any, K: Any) -> tuple[GPT2, Tensor]:
    """An initialised model that launches eagerly, and a batch whose tokens are as unequally frequent as words."""
    model = GPT2(config, K, "cuda")
    model.compile()
    model.initialise(config.train.seed)
    model.eager = True
    B = config.train.batch_size
    tokens = (np.random.default_rng(1).zipf(1.2, (B, T + 1)) % VOCAB).astype(np.int32)
    return model, pack_batch(None, tokens[:, :-1], tokens[:, 1:], config.model.vocab_size).pin_memory()


def worst(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| of the worst BLOCK of consecutive numbers, whose ||want|| counts as no less than the
    average one's.  What is NaN in both, and was thus not written, is equal; NaN in one is infinitely wrong.
    """
    wrong, size = [], []
    for a, b in zip(got.reshape(-1).split(CHUNK), want.reshape(-1).split(CHUNK)):
        a, b = a.float(), b.float()
        neither = a.isnan() & b.isnan()
        difference, b = (a - b).masked_fill(neither, 0.0), b.masked_fill(neither, 0.0)
        for numbers, norms in ((difference, wrong), (b, size)):
            padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK))
            norms.append(padded.view(-1, BLOCK).norm(dim=1))
    difference, norm = torch.cat(wrong), torch.cat(size)
    floor = norm.square().mean().sqrt().clamp_min(1e-30)
    error = (difference / norm.maximum(floor)).max().item()
    return math.inf if math.isnan(error) else error


class Stopped:
    """A call that is about to be launched: what it writes is saved, and what the current row gives is known."""

    def __init__(self, call: Call):
        self.call = call
        self.outs = [t for t in call.args[: call.launcher.outputs] if t is not None]
        self.before = [t.clone() for t in self.outs]
        self.read = [_updated(call, out) for out in self.outs]
        self._again()
        self.want = [t.clone() for t in self._results()]
        self.launches = self._launches()

    def _results(self) -> list[Tensor]:
        """What is compared: not scratch, whose partial sums are of other rows if blocks are."""
        return [t for t in self.outs if _name(self.call, t) != "scratch"]

    def _again(self) -> None:
        """The call, on outputs that are NaN where it has to write them, and as they were where it adds to them."""
        for tensor, before, read in zip(self.outs, self.before, self.read):
            if read:
                tensor.copy_(before)
            else:
                tensor.fill_(math.nan)
        self.call()

    def _launches(self) -> int:
        before, after = events()
        torch.cuda._sleep(AHEAD)
        before.record()
        self.call()
        after.record()
        after.synchronize()
        return max(1, min(50, math.ceil(SAMPLE_MS / max(before.elapsed_time(after), 1e-3))))

    def fault(self, tolerance: float) -> str | None:
        """Why a row cannot be used here: it is refused, or its outputs differ from the current row's; or None."""
        try:
            self._again()
        except REFUSED as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        error = max(worst(got, want) for got, want in zip(self._results(), self.want))
        return None if error <= tolerance else f"{DIFFERS} by {error:.1e}, more than {tolerance:.1e}"

    def graph(self) -> tuple[Any, int]:
        """So many launches as take SAMPLE_MS, and their number."""

        def launches() -> None:
            for _ in range(self.launches):
                self.call()

        return capture(launches), self.launches

    def restore(self) -> None:
        for tensor, before in zip(self.outs, self.before):
            tensor.copy_(before)


# updated in place, or added to in calls that accumulate
UPDATED = {"adamw": {"w", "m", "v", "low"}, "embedding_bwd": {"dwte"}}
ADDED_TO = {"dx", "dw", "db", "dbias", "dwpe", "losses"}


def _name(call: Call, tensor: Tensor) -> str:
    arguments = inspect.signature(call.launcher).bind(*call.args, **call.keywords).arguments
    return next(name for name, value in arguments.items() if value is tensor)


def _updated(call: Call, out: Tensor) -> bool:
    """Is what stands in this output read?"""
    name, inputs = _name(call, out), call.args[call.launcher.outputs :]
    added_to = name in UPDATED.get(call.launcher.__name__, ()) or name in ADDED_TO
    return added_to or any(_overlap(out, t) for t in inputs if isinstance(t, Tensor))


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def interleaved(graphs: dict[int, tuple[Any, int]], rounds: int) -> dict[int, float]:
    """Median milliseconds of a launch: every graph once a round, each round beginning with another one; the first round
    warms up.
    """
    spans: dict[int, list[float]] = {i: [] for i in graphs}
    order = list(graphs)
    for number in range(rounds + 1):
        at = number * len(order) // (rounds + 1)
        marks = {}
        torch.cuda._sleep(AHEAD)  # the host gets ahead, so that no time between launches is measured
        for i in order[at:] + order[:at]:
            before, after = marks[i] = events()
            before.record()
            graphs[i][0].replay()
            after.record()
        for i, (before, after) in marks.items():
            after.synchronize()
            if number:
                spans[i].append(before.elapsed_time(after) / graphs[i][1])
    return {i: statistics.median(times) for i, times in spans.items()}
