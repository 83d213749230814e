"""Plans every buffer of a run into one allocation.

A buffer is a field of a dataclass (tables.py) with a symbolic shape, a storage type and phases.
Phases are the parts of a step in which its bytes matter.  `resolve_buffers` fills in the sizes.
`place_buffers` gives offsets: the largest buffer comes first, at the first fit.  Two buffers share
bytes only if no phase needs both.  `carve` cuts typed views.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpt2_triton.model import recompute

# one step, in order; block* loop over layers
PHASES = ("embed", "block", "head", "block_bwd", "update", "between")
ALIGN = 256
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class BufferSpec:
    """One row of a table of buffers; dimensions are still symbols."""

    declared: str  # "R 4*C", or "L | R 4*C" for a list of L buffers
    # "act" (the run's dtype), "m" (optim.m), "v", "f32", "i32", "i16", "e4m3", "e5m2", "u8"
    storage: str
    # "head" | "block block_bwd" (two uses, free in between) | "block..block_bwd" (kept throughout)
    live: str
    kind: str
    # the first recompute level at which layers share one copy; "level:odd"
    # if only odd entries share it
    drop: str = ""
    # the first level at which the backward pass writes the shared copy
    # again; "": the same as `drop`
    again: str = ""
    # the buffer that lends its bytes, if it has enough; the uses of the two never overlap
    within: str = ""
    when: str = ""  # conditions, as "bf16 trains": only if all these numbers of dims are not 0
    one_copy: bool = False  # all entries of the list use one copy

    @property
    def count(self) -> str:
        return self.declared.rpartition("|")[0].strip()

    @property
    def shape(self) -> str:
        return self.declared.rpartition("|")[2].strip()


def buf(*row: Any, **more: Any) -> Any:
    """Return a dataclass field that declares a buffer; the arguments are BufferSpec's."""
    return dataclasses.field(default=None, metadata=dict(spec=BufferSpec(*row, **more)))


@dataclasses.dataclass
class Buffer:
    """A buffer with its sizes filled in."""

    name: str
    spec: BufferSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    live: str
    # the copy that each entry of a list uses; None: a single buffer
    copy_of: tuple[int, ...] | None
    within: str = ""  # the buffer whose bytes it uses
    offset: int = 0

    @property
    def copies(self) -> int:
        return max(self.copy_of) + 1 if self.copy_of else 1

    @property
    def copy_bytes(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGN) * ALIGN

    @functools.cached_property
    def nbytes(self) -> int:
        return self.copy_bytes * self.copies

    @property
    def phases(self) -> frozenset[str]:
        return parse_phases(self.live)


@functools.cache
def parse_phases(live: str) -> frozenset[str]:
    """Return the set of phases that a `live` string names.

    >>> sorted(parse_phases("embed head..update"))
    ['block_bwd', 'embed', 'head', 'update']
    """
    out: set[str] = set()
    for part in live.split():
        first, _, last = part.partition("..")
        out |= set(PHASES[PHASES.index(first) : PHASES.index(last or first) + 1])
    return frozenset(out)


def eval_shape(shape: str, dims: dict[str, int]) -> tuple[int, ...]:
    """Return a symbolic shape in numbers.

    >>> eval_shape("R 4*C", dict(R=32, C=64))
    (32, 256)
    """
    return tuple(
        math.prod(dims[t] if t in dims else int(t) for t in axis.split("*"))
        for axis in shape.split()
    )


def resolve_buffers(
    table: type, dims: dict[str, int], dtypes: dict[str, torch.dtype], levels: Sequence[str]
) -> list[Buffer]:
    """Return the table's buffers for these sizes, not yet placed; leave out empty
    buffers and buffers whose condition does not hold.

    levels  the recompute level of each layer; layers of the deeper level come first

    Three layers at level `gelu:1`: layer 0 computes GELU's output fcg again,
    so it shares layer 1's copy:

    >>> from gpt2_triton.model.gpt2.buffers import Acts
    >>> from gpt2_triton.model.recompute import layer_levels
    >>> dims = dict(B=1, T=8, R=8, Rc=8, C=4, D=12, F=16, G=16, NH=1, L=3,
    ...             S=7, Vp=8, W=8, trains=1, bf16=1, bf16_head=1, dropout=0)
    >>> dtypes = dict(act=torch.bfloat16, f32=torch.float32)
    >>> buffers = resolve_buffers(Acts, dims, dtypes, layer_levels("gelu:1", 3))
    >>> for b in buffers:
    ...     if b.copy_of:
    ...         print(f"{b.name:<5}{b.copies} copies, entries use", *b.copy_of)
    x    7 copies, entries use 0 1 2 3 4 5 6
    ln   6 copies, entries use 0 1 2 3 4 5
    mean 7 copies, entries use 0 1 2 3 4 5 6
    rstd 7 copies, entries use 0 1 2 3 4 5 6
    qkv  3 copies, entries use 0 1 2
    lse  3 copies, entries use 0 1 2
    att  3 copies, entries use 0 1 2
    fch  3 copies, entries use 0 1 2
    fcg  2 copies, entries use 0 0 1
    dfch 1 copies, entries use 0 0 0
    dqkv 1 copies, entries use 0 0 0
    dx   1 copies, entries use 0 0 0 0 0 0 0
    """
    out = []
    for field in dataclasses.fields(table):
        spec: BufferSpec = field.metadata["spec"]
        if not all(dims[condition] for condition in spec.when.split()):
            continue
        copy_of = None
        if spec.count:
            n = eval_shape(spec.count, dims)[0]
            copy_of = (0,) * n if spec.one_copy else recompute.copies(n, spec.drop, levels)
        live = recompute.phases(spec.live, spec.drop, spec.again, levels)
        shape = eval_shape(spec.shape, dims)
        out.append(Buffer(field.name, spec, shape, dtypes[spec.storage], live, copy_of))
    return [buffer for buffer in out if buffer.nbytes]


@dataclasses.dataclass
class MemoryPlan:
    """Placed buffers by name, and the bytes of the allocation."""

    buffers: dict[str, Buffer]
    total: int
    # of a forward pass in bf16 between the steps of a run in fp8
    between: "MemoryPlan | None" = None


def place_buffers(buffers: list[Buffer], fixed: Sequence[Buffer] = ()) -> MemoryPlan:
    """Place each buffer, the largest first, at the lowest offset that is free in its
    phases; `fixed` ones stay.
    """
    by_name = {b.name: b for b in (*fixed, *buffers)}
    for b in buffers:
        host = by_name.get(b.spec.within)
        if host and b.nbytes <= host.nbytes:
            b.within = host.name
    placed = [b for b in fixed if not b.within]
    for b in sorted((b for b in buffers if not b.within), key=lambda b: -b.nbytes):
        offset = 0
        for other in sorted((p for p in placed if p.phases & b.phases), key=lambda p: p.offset):
            if offset + b.nbytes <= other.offset:
                break
            offset = max(offset, other.offset + other.nbytes)
        b.offset = offset
        placed.append(b)
    for b in buffers:
        if b.within:
            host = by_name[b.within]
            assert b.phases <= host.phases, f"{b.name} outlives {host.name}"
            b.offset = host.offset
    return MemoryPlan(by_name, max(b.offset + b.nbytes for b in by_name.values()))


def carve(table: type, plan: MemoryPlan, arena: Tensor, dims: dict[str, int]) -> Any:
    """Return `table` with views of `arena`, shaped by `dims`, at most the planned
    sizes; None without a buffer.
    """

    def view(buffer: Buffer, copy: int) -> Tensor:
        shape = eval_shape(buffer.spec.shape, dims)
        assert math.prod(shape) <= math.prod(buffer.shape), (
            f"{buffer.name} {shape} exceeds the planned {buffer.shape}"
        )
        start = buffer.offset + copy * buffer.copy_bytes
        return (
            arena[start : start + math.prod(shape) * buffer.dtype.itemsize]
            .view(buffer.dtype)
            .view(shape)
        )

    def views(name: str) -> Any:
        b = plan.buffers.get(name)
        if b is None:
            return None
        if b.copy_of is None:
            return view(b, 0)
        return [view(b, copy) for copy in b.copy_of]

    return table(**{field.name: views(field.name) for field in dataclasses.fields(table)})
