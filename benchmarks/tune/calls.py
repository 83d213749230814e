"""Stops a training step before each launch, to repeat the launch with other launch
parameters, compare and time it.

The tensors that a call writes are saved and restored, so the step continues with unchanged data.
"""

import contextlib
import dataclasses
import gc
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.errors import TritonError

import gpt2_triton.kernels as kernels
from benchmarks.speed.floors import AHEAD, events
from benchmarks.speed.ops import ACCUMULATED, IN_PLACE
from benchmarks.speed.our_gpt2 import run_steps
from benchmarks.speed.sizes import VOCAB, T, work_of
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.table_file import Key, Row
from gpt2_triton.model.compiling import compile_run
from gpt2_triton.model.cuda import capture
from gpt2_triton.model.model import Model

# by the compiler, the driver or the launcher
REFUSED = (TritonError, RuntimeError, ValueError, AssertionError)
DIFFERS = "its numbers differ from the current row's"
SAMPLE_MS = 1.0  # time that a graph's launches take together: events resolve about a microsecond
BLOCK, CHUNK = 256, 1 << 24  # numbers in a block, which has one error; numbers compared at a time


def leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments, and the fields of those that are tuples."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from leaves(argument)
        else:
            yield argument


class Rows(dict[Key, Row]):
    """The rows of a table, as a dictionary that records in `used` which keys are looked up."""

    used: set[Key]

    def __getitem__(self, key: Key) -> Row:
        self.used.add(key)
        return super().__getitem__(key)


@contextlib.contextmanager
def recorded_rows() -> Iterator[Rows]:
    """Yield a copy of the table's rows; inside the context, launchers take their rows from it."""
    table = tuning.table
    rows = Rows(table().rows)
    rows.used = set()
    replaced = table()._replace(rows=rows)
    tuning.table = lambda: replaced
    try:
        yield rows
    finally:
        tuning.table = table


@contextlib.contextmanager
def trying(rows: dict[Key, Row], key: Key, row: Row) -> Iterator[None]:
    """Replace the row of `key` inside the context."""
    before = rows[key]
    rows[key] = row
    try:
        yield
    finally:
        rows[key] = before


@dataclasses.dataclass
class Call:
    """A launcher with its arguments, and the keys of the rows that it uses."""

    launcher: Any  # with the attributes of kernels/contract.py
    args: tuple
    keywords: dict[str, Any]
    used: set[Key] = dataclasses.field(default_factory=set)

    def __call__(self) -> None:
        self.launcher(*self.args, **self.keywords)

    @property
    def key(self) -> str:
        """Launcher, shapes and flags, without other arguments: equal for
        calls that take the same time.
        """
        parts = [
            "x".join(map(str, v.shape))
            if isinstance(v, Tensor)
            else str(v)
            if v is None or type(v) is bool
            else "."
            for v in leaves((*self.args, *self.keywords.values()))
        ]
        return " ".join([self.launcher.__name__, *parts])


class Interceptor:
    """Stands in for the kernel package, and records the rows that each call uses.

    If `on_call` is set, calls on_call(call) before the first call with each `Call.key`.
    """

    def __init__(self, rows: Rows):
        self.rows = rows
        self.on_call: Callable[[Call], None] | None = None
        self.used: dict[str, set[Key]] = {}
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        launcher = getattr(kernels, name)
        if not hasattr(launcher, "contract"):
            return launcher

        def launch(*args: Any, **keywords: Any) -> None:
            call = Call(launcher, args, keywords)
            if self.on_call is not None and call.key not in self.seen:
                self.seen.add(call.key)
                call.used = self.used[call.key]
                self.on_call(call)
            self.rows.used.clear()
            call()
            self.used[call.key] = set(self.rows.used)

        return launch


def intercepted_step(size: str, batch: int, rows: Rows, on_call: Callable[[Call], None]) -> None:
    """Run two steps of one layer: the first records each call's rows, the second calls
    on_call before each call.
    """
    K = Interceptor(rows)
    model, packed = model_of(work_of(size, batch, None).config(n_layer=1), K)
    K.used = {}
    list(run_steps(model, packed, range(1)))
    K.on_call = on_call
    list(run_steps(model, packed, range(1, 2)))
    K.on_call = None
    del model
    gc.collect()  # frees the arena before the next one is allocated
    torch.cuda.empty_cache()


def model_of(config: Any, K: Any) -> tuple[Model, Tensor]:
    """Return an initialised model that launches eagerly, and a batch whose tokens have
    the frequencies of words.
    """
    model = Model(config, K, "cuda")
    compile_run(model)
    model.initialise(config.train.seed)
    model.eager = True
    B = config.train.batch_size
    tokens = (np.random.default_rng(1).zipf(1.2, (B, T + 1)) % VOCAB).astype(np.int32)
    return model, pack_batch(
        None, tokens[:, :-1], tokens[:, 1:], config.model.vocab_size
    ).pin_memory()


def worst(got: Tensor, want: Tensor) -> float:
    """Return the largest ||got - want|| / ||want|| over blocks of BLOCK consecutive numbers.

    A block's ||want|| is replaced by the root mean square over blocks if that is larger.  NaN in
    both means that no kernel wrote the number, and is no error; NaN in one is an infinite error.
    """
    wrong, size = [], []
    for a, b in zip(got.reshape(-1).split(CHUNK), want.reshape(-1).split(CHUNK)):
        a = a.float()
        b = b.float()
        neither = a.isnan() & b.isnan()
        difference = (a - b).masked_fill(neither, 0.0)
        b = b.masked_fill(neither, 0.0)
        for numbers, norms in ((difference, wrong), (b, size)):
            padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK))
            norms.append(padded.view(-1, BLOCK).norm(dim=1))
    difference = torch.cat(wrong)
    norm = torch.cat(size)
    floor = norm.square().mean().sqrt().clamp_min(1e-30)
    error = (difference / norm.maximum(floor)).max().item()
    return math.inf if math.isnan(error) else error


class Trial:
    """A call, the contents of its outputs before the launch, and its
    results with the current row.
    """

    def __init__(self, call: Call):
        self.call = call
        self.outs = call.launcher.contract.outputs(call.args)
        self.before = {name: t.clone() for name, t in self.outs.items()}
        self.read = {name for name, t in self.outs.items() if _updated(call, name, t)}
        self._again()
        self.want = [t.clone() for t in self._results()]
        self.launches = self._launches()

    def _results(self) -> list[Tensor]:
        """Return the outputs to compare: all but partial sums, which depend on block sizes."""
        results = {name: t for name, t in self.outs.items() if name != "scratch"}
        if "rowsum" in results:  # the sums of p's rows; those of its tiles follow
            results["rowsum"] = results["rowsum"][: len(results["p"])]
        return list(results.values())

    def _again(self) -> None:
        """Restore the outputs that the call reads, fill the others with
        NaN, and repeat the call.
        """
        for name, tensor in self.outs.items():
            if name in self.read:
                tensor.copy_(self.before[name])
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
        """Return why the row cannot be used: an error, or outputs that differ from the
        current row's; else None.
        """
        try:
            self._again()
        except REFUSED as refused:
            return (
                f"{type(refused).__name__}: {str(refused).splitlines()[0] if str(refused) else ''}"
            )
        error = max(worst(got, want) for got, want in zip(self._results(), self.want))
        if error <= tolerance:
            return None
        return f"{DIFFERS} by {error:.1e}, more than {tolerance:.1e}"

    def graph(self) -> tuple[Any, int]:
        """Return a graph that repeats the launch for about SAMPLE_MS, and the
        number of launches in it.
        """

        def launches() -> None:
            for _ in range(self.launches):
                self.call()

        return capture(launches), self.launches

    def restore(self) -> None:
        for name, tensor in self.outs.items():
            tensor.copy_(self.before[name])


def _updated(call: Call, name: str, out: Tensor) -> bool:
    """Return whether the call reads the old content of the output of this name."""
    field = name.rpartition(".")[2]
    in_place = IN_PLACE.get(call.launcher.__name__, ())
    if field in ACCUMULATED or field == "dx" or field in in_place:
        return True
    inputs = call.launcher.contract.inputs(call.args).values()
    return any(_overlap(out, t) for t in inputs if isinstance(t, Tensor))


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def interleaved(graphs: dict[int, tuple[Any, int]], rounds: int) -> dict[int, float]:
    """Return the median milliseconds of a launch of each graph.

    Each round replays each graph once, in an order that rotates from round to
    round.  The first round warms up.
    """
    spans: dict[int, list[float]] = {i: [] for i in graphs}
    order = list(graphs)
    for number in range(rounds + 1):
        at = number * len(order) // (rounds + 1)
        marks = {}
        # the GPU waits until the host has queued the launches, so no gaps are measured
        torch.cuda._sleep(AHEAD)
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
