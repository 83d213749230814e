"""Runs the Gluon kernels of kernels/hopper/ on CPU tensors and checks how
their partitions synchronise.

    with simulated(hopper_matmul, seed=1):
        hopper_matmul.matmul(...)

Device functions run as Python functions.  LANGUAGE and NAMES below replace `gl`, `tl`, `mbarrier`
and `tma`, with only what the kernels use; INSTRUCTIONS has their PTX.  A program is a thread, as is
each partition, and one runs at a time.  At every barrier, load and store the seed chooses which
partition continues and which TMA transfer completes.

Asynchronous operations take effect as late as the hardware allows.  wgmma reads its
operands when it is waited for, in the order of issue.  A TMA store reads shared memory at
any time before its wait.  A buffer that is released too early therefore spoils the result,
which the test compares with float64.

`Race` is raised for:
    memory    a read of what a load is still writing, a write to what a load or store still uses, a
              TMA store of what was written without a fence, an address outside a tensor
    barriers  a wait that never ends, an arrival too many, a use after invalidation, a barrier that
              nothing uses, or that a kernel without partitions does not invalidate
    ends      a partition that ends before its stores have, a load that nothing waits for

What it does not check: registers, layouts, alignment, and speed.  test_hopper.py
compiles the kernels for that.  test_hopper_simulated.py removes each kind of wait and
checks that the simulator finds it.
"""

import contextlib
import functools
import importlib
import itertools
import pkgutil
import queue
import random
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton

from gpt2_triton.kernels import device_math, e4m3, hopper, rope, tiles, tuning
from gpt2_triton.kernels.hopper import fp8_gelu

HOPPER = [
    importlib.import_module(f"{hopper.__name__}.{found.name}")
    for found in pkgutil.iter_modules(hopper.__path__)
]
KERNELS = [module for module in HOPPER if any(name.endswith("_kernel") for name in vars(module))]
MODULES = (tiles, device_math, rope, *HOPPER)
local = threading.local()  # .worker: the partition of this thread


class Race(AssertionError):
    """Two unordered accesses, or a wait that never ends."""


# ---- partitions as threads, one at a time ----


class Worker:
    """A partition: runs until it waits for a condition or yields."""

    def __init__(
        self,
        turns: "Turns",
        name: str,
        warps: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ):
        self.turns, self.name, self.warps, self.issued = turns, name, warps, 0
        # the numbers of those issued stores that still read shared memory
        self.stores: set[int] = set()
        self.ready: Callable[[], bool] = lambda: True
        self.products: list[Product] = []  # issued and not finished
        # partitions that follow
        self.then: list[tuple[str, int, Callable[..., Any], tuple[Any, ...]]] = []
        self.go, self.done, self.error = queue.SimpleQueue(), False, None
        threading.Thread(target=self._run, args=(function, arguments), daemon=True).start()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        local.worker = self
        self.go.get()
        try:
            if not self.turns.over:
                function(*arguments)
        except BaseException as error:
            self.error = error
        self.done = True
        self.turns.back.put(None)

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        self.ready = ready
        self.turns.back.put(None)
        self.go.get()
        if self.turns.over:
            raise Race("another partition failed")


class Turns:
    """One program: its partitions, and the transfers in flight."""

    def __init__(
        self,
        draws: random.Random,
        program: tuple[int, ...],
        programs: tuple[int, ...],
        most_warps: int,
    ):
        self.draws, self.program, self.programs, self.most_warps = (
            draws,
            program,
            programs,
            most_warps,
        )
        # the probability that a transfer completes next
        self.haste = draws.choice((0.02, 0.2, 0.8))
        self.back, self.over = queue.SimpleQueue(), False
        self.workers: list[Worker] = []
        self.memories: list[Memory] = []
        self.barriers: list[list[Barrier]] = []  # by allocation
        # places, memory, completion
        self.loads: list[tuple[torch.Tensor, Any, Callable[[], None]]] = []
        self.stores: list[tuple[torch.Tensor, Any, Callable[[], None]]] = []

    def run(self, partitions: list[tuple[str, int, Callable[..., Any], tuple[Any, ...]]]) -> None:
        self.workers = [Worker(self, *partition) for partition in partitions]
        while not all(worker.done for worker in self.workers) or self.stores:
            able = [worker for worker in self.workers if not worker.done and worker.ready()]
            transfers = [(kind, i) for kind in (self.loads, self.stores) for i in range(len(kind))]
            if transfers and (not able or self.draws.random() < self.haste):
                kind, i = self.draws.choice(transfers)
                kind.pop(i)[2]()
            elif able:
                worker = self.draws.choice(able)
                worker.go.put(None)
                self.back.get()
                if worker.error:
                    self._end(worker.error)
                if worker.done and worker.stores:
                    self._end(Race(f"{worker.name} ends while a store still reads shared memory"))
            else:
                waiting = ", ".join(worker.name for worker in self.workers if not worker.done)
                self._end(Race(f"program {self.program}: {waiting} wait for ever"))
        if self.loads:
            raise Race(f"program {self.program}: a load is still in flight at the end")

    def _end(self, error: BaseException) -> None:
        self.over = True
        for worker in self.workers:
            worker.go.put(None)
        raise error

    def check(self, what: str, memory: Any, places: torch.Tensor, *kinds: list[Any]) -> None:
        if overlap(
            memory, places, [busy for kind in kinds for busy, where, _ in kind if where is memory]
        ):
            raise Race(f"{local.worker.name} {what} shared memory that a transfer still uses")


# ---- values ----


class Int(int):
    """A scalar of a kernel; has .to, as tensors do."""

    def to(self, dtype: Any) -> "Int":
        return self


def _keep(name: str) -> Callable[..., Any]:
    function = getattr(int, name)

    def operator(self: Int, other: Any) -> Any:
        if isinstance(other, int) and not isinstance(other, bool):
            result = function(self, int(other))
            # Triton's rounds towards zero
            return Int(int(self / other) if name == "__floordiv__" else result)
        return NotImplemented

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor"):
    setattr(Int, f"__{_name}__", _keep(f"__{_name}__"))


class Value(torch.Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Value":
        x = self.as_subclass(torch.Tensor)
        return value(x.view(dtype) if bitcast else x.to(dtype))


def value(tensor: torch.Tensor) -> Value:
    return tensor.as_subclass(Value)


class Pointer:
    def __init__(self, tensor: torch.Tensor, at: Any = 0):
        self.flat, self.at = tensor.view(-1), at

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.flat, self.at + more)

    def places(self, mask: Any) -> tuple[torch.Tensor, Any]:
        """Return the place of each element, 0 where the mask excludes it, and the
        mask in their shape or None.
        """
        at = torch.as_tensor(self.at).as_subclass(torch.Tensor).long()
        if mask is not None:
            mask = torch.broadcast_to(torch.as_tensor(mask).as_subclass(torch.Tensor), at.shape)
            at = at.where(mask, 0)
        if at.min() < 0 or at.max() >= self.flat.numel():
            raise Race(f"{local.worker.name} reads or writes outside a tensor")
        return at, mask


class Memory:
    """One allocation of shared memory."""

    def __init__(self, count: int, dtype: torch.dtype):
        self.data = torch.full((count,), float("nan")).to(dtype)
        self.unfenced: list[tuple[Worker, torch.Tensor]] = []  # writers and places, until the fence


def overlap(memory: Memory, places: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Return True if one of the others has a place of `places`; torch.isin would sort them."""
    taken = torch.zeros(memory.data.numel() if others else 0, dtype=torch.bool)
    if others:
        taken[places] = True
    return any(bool(taken[other].any()) for other in others)


class Shared:
    """A view of shared memory: the place of each of its elements.  A matrix of more than 64 columns
    is stored as its columns 0 ... 63, row by row, then the next 64.
    """

    def __init__(self, memory: Memory, places: torch.Tensor):
        self.memory, self.places = memory, places
        self.shape, self.dtype = tuple(places.shape), memory.data.dtype

    @staticmethod
    def view(memory: Memory, shape: list[int]) -> "Shared":
        if len(shape) == 1:
            return Shared(memory, torch.arange(memory.data.numel()))
        *outer, rows, columns = shape
        parts = max(1, columns // 64)
        places = torch.arange(memory.data.numel()).view(*outer, parts, rows, columns // parts)
        return Shared(memory, places.transpose(-3, -2).reshape(shape))

    def index(self, i: int) -> "Shared":
        return Shared(self.memory, self.places[i])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.memory, self.places.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.memory, self.places.permute(*order))

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        return Shared.view(self.memory, shape)

    def load(self, layout: Any = None) -> Value:
        turns = local.worker.turns
        turns.check("reads", self.memory, self.places, turns.loads)
        return value(self.memory.data[self.places])

    def store(self, x: torch.Tensor) -> None:
        turns = local.worker.turns
        turns.check("writes", self.memory, self.places, turns.loads, turns.stores)
        assert tuple(x.shape) == self.shape and x.dtype == self.memory.data.dtype
        self.memory.data[self.places] = x.as_subclass(torch.Tensor)
        self.memory.unfenced.append((local.worker, self.places))


class Descriptor:
    """TMA's view of a matrix in blocks: zeros are read outside, and nothing is written."""

    def __init__(self, tensor: torch.Tensor, rows: int, columns: int):
        self.tensor, self.dtype, self.layout = tensor, tensor.dtype, None
        self.block_type = SimpleNamespace(
            shape=[rows, columns], nbytes=rows * columns * tensor.element_size()
        )

    def block(self, corner: list[int]) -> torch.Tensor:
        """Return the part of the matrix that is in a block."""
        r, c = (slice(at, at + n) for at, n in zip(corner, self.block_type.shape, strict=True))
        return self.tensor[r, c]


class Barrier:
    """An mbarrier: a phase completes when all expected arrivals and bytes have come."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0
        self.valid = self.was_used = False

    def used(self) -> "Barrier":
        if not self.valid:
            raise Race(f"{local.worker.name} uses a barrier that is invalidated")
        self.was_used = True
        return self

    def arrive(self, count: int = 1, nbytes: int = 0) -> None:
        self.missing -= count
        self.bytes += nbytes
        if self.missing < 0:
            raise Race(f"{local.worker.name} arrives at a barrier once too often")
        self.settle()

    def settle(self) -> None:
        if self.missing == self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


class Product:
    """acc + a @ b, or a @ b: a wgmma that has been issued, with a result
    once it has been waited for.
    """

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool):
        self.a, self.b, self.acc, self.use_acc, self.result = a, b, acc, use_acc, None
        local.worker.products.append(self)

    def finish(self) -> None:
        a = self.a.load() if isinstance(self.a, Shared) else self.a
        self.result = a.float() @ self.b.load().float()
        if self.use_acc:
            self.result = self.result + finished(self.acc)


def finished(x: Any) -> Any:
    """Return the result of a product that has been waited for; anything else as it is."""
    return x if getattr(x, "result", None) is None else x.result


# ---- the language ----


def _mma(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    return Product(a, b, acc, use_acc)


def mma_wait(pending: int, deps: tuple[Any, ...]) -> Any:
    """Finish all products but the last `pending`; return what was given, with their results."""
    products = local.worker.products
    while len(products) > pending:
        products.pop(0).finish()
    return _given(tuple(finished(x) for x in deps))


def _barrier_wait(barrier: Barrier, parity: int) -> None:
    barrier.used()
    local.worker.wait(lambda: barrier.phase & 1 != parity)


def _expect(barrier: Barrier, nbytes: int, pred: bool = True) -> None:
    if pred:
        barrier.used().arrive(nbytes=nbytes)


def _arrive(barrier: Barrier, count: int, pred: bool = True) -> None:
    if pred:
        barrier.used().arrive(count)
        local.worker.wait()


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count
    barrier.valid = True


def _invalidate(barrier: Barrier) -> None:
    if barrier.bytes or barrier.missing != barrier.count:
        raise Race(f"{local.worker.name} invalidates a barrier whose phase is not complete")
    barrier.valid = False


def _tma_load(
    desc: Descriptor, corner: list[int], barrier: Barrier, shared: Shared, pred: bool = True
) -> None:
    turns = local.worker.turns
    if not pred:
        return
    turns.check("loads into", shared.memory, shared.places, turns.loads, turns.stores)
    assert shared.shape == tuple(desc.block_type.shape)
    barrier.used()

    def arrive() -> None:
        block = torch.zeros(shared.shape, dtype=shared.dtype)
        part = desc.block(corner)
        block[: part.shape[0], : part.shape[1]] = part
        shared.memory.data[shared.places] = block
        barrier.bytes -= desc.block_type.nbytes
        barrier.settle()

    turns.loads.append((shared.places, shared.memory, arrive))
    local.worker.wait()


def _tma_store(desc: Descriptor, corner: list[int], shared: Shared) -> None:
    worker = local.worker
    if overlap(shared.memory, shared.places, [places for _, places in shared.memory.unfenced]):
        raise Race(f"{worker.name} stores shared memory that was written without a fence")
    worker.turns.check("stores", shared.memory, shared.places, worker.turns.loads)
    number = worker.issued
    worker.issued += 1
    worker.stores.add(number)

    def leave() -> None:
        part = desc.block(corner)
        part.copy_(shared.memory.data[shared.places[: part.shape[0], : part.shape[1]]])
        worker.stores.remove(number)

    worker.turns.stores.append((shared.places, shared.memory, leave))
    worker.wait()


def _store_wait(pending: int) -> None:
    worker = local.worker
    worker.wait(lambda: all(number >= worker.issued - pending for number in worker.stores))


def _fence() -> None:
    """Make this partition's writes visible to TMA."""
    for memory in local.worker.turns.memories:
        memory.unfenced = [
            (worker, places) for worker, places in memory.unfenced if worker is not local.worker
        ]


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        bars = [Barrier() for _ in range(shape[0])]
        local.worker.turns.barriers.append(bars)
        return SimpleNamespace(index=lambda i: bars[i], shape=(*shape,))
    memory = Memory(torch.Size(shape).numel(), dtype)
    local.worker.turns.memories.append(memory)
    return Shared.view(memory, shape)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
    at, mask = pointer.places(mask)
    x = pointer.flat[at]
    return value(x if mask is None else x.where(mask, torch.tensor(other, dtype=x.dtype)))


def _store(pointer: Pointer, x: torch.Tensor, mask: Any = None) -> None:
    at, mask = pointer.places(mask)
    x = torch.broadcast_to(torch.as_tensor(x).as_subclass(torch.Tensor), at.shape).to(
        pointer.flat.dtype
    )
    kept = ... if mask is None else mask
    pointer.flat[at[kept]] = x[kept]


def _specialize(
    partitions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]
) -> None:
    default, most = local.worker.warps, local.worker.turns.most_warps
    assert default + sum(warps) <= most, f"registers for {most} warps"
    local.worker.then = [
        (function.__name__, n, function, arguments)
        for (function, arguments), n in zip(partitions, (default, *warps), strict=True)
    ]


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def _e5m2(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-57344, 57344).to(torch.float8_e5m2)


def _quantise(x: Value, scale: Pointer, amax: Pointer | None) -> torch.Tensor:
    return _quantised(x, scale.flat, amax)


def _quantised(x: Value, scale: torch.Tensor, amax: Pointer | None) -> torch.Tensor:
    if amax is not None:
        cell = local.worker.turns.program[0] % amax.flat.numel()
        amax.flat[cell] = torch.maximum(amax.flat[cell], x.abs().max().view(torch.int32))
    return _e4m3(x * scale)


def _atomic_max(pointer: Pointer, x: Value, sem: str) -> None:
    at, _ = pointer.places(None)
    pointer.flat[at] = torch.maximum(pointer.flat[at], x.as_subclass(torch.Tensor))


def _gelu_and_byte(x: Value, scale: Value) -> tuple[Value, Value]:
    wide = x.float().requires_grad_()
    y = torch.nn.functional.gelu(wide, approximate="tanh")
    (slope,) = torch.autograd.grad(y.sum(), wide)
    byte = (slope * e4m3.STEPS.value + e4m3.ZERO.value).round().to(torch.uint8)
    return value(_e4m3(y.detach() * scale.float())), value(byte)


def _times_byte(x: Value, byte: Value) -> tuple[Value, Value]:
    product = ((byte.float() - e4m3.ZERO.value) * x.float()).to(torch.float16)
    return value(_e4m3(product.float())), value(product)


INSTRUCTIONS = {  # of PTX: the beginning of their text
    "tanh.approx": torch.tanh,
    "cvt.rn.satfinite.f16x2": lambda x: x.clamp(-65504, 65504).to(torch.float16),
    fp8_gelu.GELU_ASM.value: _gelu_and_byte,
    fp8_gelu.DGELU_ASM.value: _times_byte,
}


def _inline_asm(asm: str, constraints: str, arguments: list[Value], **_: Any) -> Any:
    [function] = [function for text, function in INSTRUCTIONS.items() if asm.startswith(text)]
    return function(*arguments)


def _paired_columns(x: Value, E5M2: bool = False) -> torch.Tensor:
    rows, columns = x.shape
    bytes_ = (_e5m2(x) if E5M2 else _e4m3(x)).view(torch.uint8).to(torch.int16)
    low, high = bytes_.view(rows // 16, 2, 8, columns).unbind(1)
    return (low | (high << 8)).view(rows // 2, columns).T


LANGUAGE = dict(
    program_id=lambda axis: Int(local.worker.turns.program[axis]),
    num_programs=lambda axis: Int(local.worker.turns.programs[axis]),
    num_warps=lambda: local.worker.warps,
    cdiv=lambda a, b: Int(-(-a // b)),
    arange=lambda start, end, layout=None: value(torch.arange(start, end)),
    zeros=lambda shape, dtype, layout=None: value(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, number, dtype, layout=None: value(torch.full(shape, number, dtype=dtype)),
    zeros_like=torch.zeros_like,
    sum=lambda x, axis: x.sum(axis),
    max=torch.amax,
    reshape=lambda x, shape: x.reshape(shape),
    permute=lambda x, order: x.permute(*order),
    split=lambda x: x.unbind(-1),
    join=lambda a, b: torch.stack((a, b), -1),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    static_range=lambda *bounds: map(Int, range(*bounds)),
    load=_load,
    store=_store,
    atomic_max=_atomic_max,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    SliceLayout=lambda *_: None,
    BlockedLayout=lambda *_: None,
    NVMMADistributedLayout=lambda *_: None,
    constexpr=None,
    float32=torch.float32,
    bfloat16=torch.bfloat16,
    float16=torch.float16,
    float8e4nv=torch.float8_e4m3fn,
    float8e5=torch.float8_e5m2,
    int64=torch.int64,
    int32=torch.int32,
    int16=torch.int16,
    uint8=torch.uint8,
    # of triton.language, in device functions
    inline_asm_elementwise=_inline_asm,
    sigmoid=torch.sigmoid,
    exp2=torch.exp2,
    rsqrt=torch.rsqrt,
    log2=torch.log2,
    maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)),
    fma=lambda a, b, c: a * b + c,
    where=lambda mask, a, b: torch.where(mask, a, torch.as_tensor(b)),
    minimum=lambda a, b, propagate_nan=None: torch.clamp(a, max=b),
    PropagateNan=SimpleNamespace(ALL=None),
)
NAMES: dict[str, Any] = dict(
    gl=SimpleNamespace(**LANGUAGE),
    tl=SimpleNamespace(**LANGUAGE),
    mbarrier=SimpleNamespace(
        init=_init,
        wait=_barrier_wait,
        arrive=_arrive,
        expect=_expect,
        invalidate=_invalidate,
        MBarrierLayout=lambda: None,
    ),
    tma=SimpleNamespace(store_wait=_store_wait),
    tma_load=_tma_load,
    tma_store=_tma_store,
    fence_async_shared=_fence,
    warpgroup_mma=_mma,
    warpgroup_mma_init=lambda acc: acc,
    warpgroup_mma_wait=mma_wait,
    quantise=_quantise,
    quantised=_quantised,  # in e4m3.py written for bits of registers; test_fp8.py tests them
    to_e5m2=_e5m2,
    nearest_e5m2=lambda x: value(_e5m2(x).float()),
    peek_exponent=lambda peek: value((1 + peek).log2().floor()),
    paired_columns=_paired_columns,
    range=lambda *bounds: map(Int, range(*bounds)),
    min=lambda *numbers: Int(min(numbers)),
)

_silent = SimpleNamespace(**vars(NAMES["mbarrier"]) | dict(wait=lambda barrier, parity: None))
# what `simulated` may replace, to show that it finds what is missing
MISSING: dict[str, dict[str, Any]] = {
    "early load": dict(wait_empty=lambda *_: None),
    "no fence": dict(fence_async_shared=lambda: None),
    "no wait for stores": dict(tma=SimpleNamespace(store_wait=lambda pending: None)),
    "too short a wait": dict(
        tma=SimpleNamespace(store_wait=lambda pending: _store_wait(pending + 1))
    ),
    "early release": dict(
        warpgroup_mma_wait=lambda pending, deps: _given(deps) if pending else mma_wait(0, deps)
    ),
    "no wait for loads": dict(mbarrier=_silent),
}


def _given(deps: tuple[Any, ...]) -> Any:
    return deps if len(deps) > 1 else deps[0]


def _python_functions(replaced: dict[str, Any]) -> dict[tuple[str, str], FunctionType]:
    """Return each device function, by module and name, as a Python function in
    the simulator's language.
    """
    spaces: dict[str, dict[str, Any]] = {module.__name__: {} for module in MODULES}
    functions = {}
    for module in MODULES:
        for name, item in vars(module).items():
            if _is_device_function(item) and item.fn.__module__ == module.__name__:
                code, defaults = item.fn.__code__, item.fn.__defaults__
                functions[module.__name__, name] = FunctionType(
                    code, spaces[module.__name__], name, defaults
                )
    for module in MODULES:
        for name, item in vars(module).items():
            if _is_device_function(item):
                # None: of e4m3, which NAMES replaces
                item = functions.get((item.fn.__module__, item.fn.__name__))
            elif isinstance(item, triton.language.constexpr):
                item = item.value
            spaces[module.__name__][name] = item
        spaces[module.__name__] |= NAMES | replaced
    return functions


def _is_device_function(item: Any) -> bool:
    return callable(getattr(item, "fn", None)) and type(item).__module__.startswith("triton")


def _describe(tensor: torch.Tensor | None, rows: int, columns: int) -> Descriptor | None:
    return None if tensor is None else Descriptor(tensor, rows, columns)


def _argument(x: Any) -> Any:
    """Return an argument as a kernel has it; a tuple has names."""
    if isinstance(x, tuple):
        return type(x)(*map(_argument, x))
    if isinstance(x, triton.language.constexpr):
        return x.value
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    return Int(x) if type(x) is int else x


class Kernel:
    """Runs kernel[grid](arguments): all programs, one after the other."""

    def __init__(self, function: FunctionType, draws: random.Random):
        self.function, self.draws = function, draws

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, maxnreg: int = 255, **constants: Any) -> None:
            whole = functools.partial(self.function, **constants)
            for program in itertools.product(*map(range, grid)):
                turns = Turns(self.draws, program, grid, 65536 // (32 * maxnreg))
                turns.run([("program", num_warps, whole, tuple(map(_argument, arguments)))])
                if partitions := turns.workers[0].then:
                    turns.run(partitions)
                elif any(barrier.valid for made in turns.barriers for barrier in made):
                    raise Race(f"program {program}: a barrier is not invalidated")
                if not all(any(barrier.was_used for barrier in made) for made in turns.barriers):
                    raise Race(f"program {program}: nothing uses a barrier")

        return launch


@contextlib.contextmanager
def simulated(module: ModuleType, seed: int, programs: int = 3, **replaced: Any) -> Iterator[None]:
    """Run a hopper module's launchers on CPU tensors, with that many programs;
    `replaced` replaces names in them.
    """
    draws, functions = random.Random(seed), _python_functions(replaced)
    kernels = {
        name: Kernel(function, draws)
        for (where, name), function in functions.items()
        if where == module.__name__ and name.endswith("_kernel")
    }
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(module, **kernels))
        patches.enter_context(mock.patch.object(tuning, "num_sms", lambda: programs))
        for described in MODULES:
            if hasattr(described, "describe"):
                patches.enter_context(mock.patch.object(described, "describe", _describe))
        yield
