"""One table of buffers, one allocation.

A buffer is a field of a dataclass table (tables.py): its symbolic shape, its storage and the phases in which its
bytes matter.
`plan` turns tables and sizes into offsets (first fit, largest first; two rows share bytes only if no phase sees
both), `Plan.show` prints them without a GPU, and `carve` cuts typed views out of the one allocation.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PHASES = ("embed", "block", "head", "block_bwd", "update", "between")  # one step, in order; block* loop over layers
ALIGN = 256
GIB = 2**30


def buf(shape: str, storage: str, live: str, kind: str, drop: str = "", again: str = "", within: str = "") -> Any:
    """A table row.

    shape    "R 4*C", or "L | R 4*C" for a list of L buffers
    storage  "act" (the run's dtype), "f32", "i32", "i16"
    live     "head" | "block block_bwd" (two uses, free between) | "block..block_bwd" (kept throughout)
    drop     the recompute level from which on layers have one buffer for all, "level:odd" for the list's odd entries
             only
    again    the level from which on that buffer is written again in the backward pass, if not `drop`
    within   the row whose bytes this one shares, its uses never overlapping
    """
    return dataclasses.field(
        default=None,
        metadata=dict(
            shape=shape, storage=storage, live=live, kind=kind, drop=drop, again=again or drop, within=within
        ),
    )


@dataclasses.dataclass
class Row:
    """A buffer with its sizes filled in; `slots[i]` says which of the `copies` the list's entry i uses (None: not a
    list).
    """

    name: str
    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    live: str
    kind: str
    within: str
    slots: tuple[int, ...] | None
    copies: int
    offset: int = 0

    @property
    def copy_bytes(self) -> int:
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGN) * ALIGN

    @property
    def nbytes(self) -> int:
        return self.copy_bytes * self.copies

    @property
    def phases(self) -> frozenset[str]:
        return phases(self.live)


def phases(live: str) -> frozenset[str]:
    """The set of phases that a `live` string names."""
    out: set[str] = set()
    for part in live.split():
        first, _, last = part.partition("..")
        out |= set(PHASES[PHASES.index(first) : PHASES.index(last or first) + 1])
    return frozenset(out)


def sizes(spec: str, dims: dict[str, int]) -> tuple[int, ...]:
    """ "R 4*C" -> (R, 4*C) in numbers."""
    return tuple(math.prod(dims[t] if t in dims else int(t) for t in axis.split("*")) for axis in spec.split())


def resolve(
    table: type, dims: dict[str, int], dtypes: dict[str, torch.dtype], levels: Sequence[str], order: Sequence[str]
) -> list[Row]:
    """The table's rows for these sizes and the recompute level of each layer, not yet placed; rows of no elements are
    left out.  `order` has all levels; the layers of a deeper one come first.
    """
    rows = []
    for field in dataclasses.fields(table):
        m = field.metadata
        stack, _, spec = m["shape"].rpartition("|")
        n = sizes(stack, dims)[0] if stack else 0
        drop, _, which = m["drop"].partition(":")
        dropped = [order.index(level) >= order.index(drop) for level in levels] if drop else []
        slots, live = _slots(n, dropped, which == "odd"), m["live"]
        if dropped and all(dropped) and not which:
            live = "block block_bwd" if order.index(levels[0]) >= order.index(m["again"]) else "block"
        row = Row(
            field.name,
            spec.strip(),
            sizes(spec, dims),
            dtypes[m["storage"]],
            live,
            m["kind"],
            m["within"],
            slots if stack else None,
            max(slots) + 1 if stack else 1,
        )
        if row.nbytes:
            rows.append(row)
    return rows


def _slots(n: int, dropped: Sequence[bool], odd: bool) -> tuple[int, ...]:
    """The copy that each of a list's n entries, one or two a layer, has; `dropped` says which layers keep none.

    Those layers, the first ones, take the copy of the first layer that keeps its own: forward they are done with it
    before that layer writes it, and backward it is done with it before they write it again.
    """
    a_layer = n // len(dropped) if dropped else 1
    kept = [i for i in range(n) if i // a_layer >= sum(dropped) or odd and i % 2 == 0]
    common = next((slot for slot, i in enumerate(kept) if i % 2 or not odd), len(kept))
    own = {i: slot for slot, i in enumerate(kept)}
    return tuple(own.get(i, common) for i in range(n))


@dataclasses.dataclass
class Plan:
    """Placed rows by name, and the bytes of the one allocation."""

    rows: dict[str, Row]
    total: int

    def by_kind(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for row in self.rows.values():
            out[row.kind] = out.get(row.kind, 0) + (0 if row.within else row.nbytes)
        return out

    def show(self) -> str:
        """The plan as text: a line a buffer, bytes by class, the total."""
        lines = [f"{'buffer':<10}{'shape':<16}{'copies':>7}{'dtype':>10}  {'live':<24}{'MiB':>11}{'offset':>16}"]
        for row in self.rows.values():
            dtype, size = str(row.dtype).removeprefix("torch."), row.nbytes / 2**20
            note = f"in {row.within}" if row.within else f"{size:,.1f}"
            lines.append(
                f"{row.name:<10}{row.spec:<16}{row.copies:>7}{dtype:>10}  {row.live:<24}{note:>11}{row.offset:>16,}"
            )
        lines += ["", f"{'class':<16}{'MiB':>11}"]
        lines += [f"{kind:<16}{nbytes / 2**20:>11,.1f}" for kind, nbytes in self.by_kind().items()]
        shared = sum(self.by_kind().values()) - self.total
        lines.append(
            f"arena {self.total / 2**20:,.1f} MiB = {self.total / GIB:.2f} GiB "
            f"({shared / 2**20:,.1f} MiB saved by sharing)"
        )
        return "\n".join(lines)


def plan(rows: list[Row]) -> Plan:
    """Place every row: largest first, at the lowest offset free in all its phases."""
    placed: list[Row] = []
    for row in sorted((r for r in rows if not r.within), key=lambda r: -r.nbytes):
        at = 0
        for other in sorted((q for q in placed if q.phases & row.phases), key=lambda q: q.offset):
            if at + row.nbytes <= other.offset:
                break
            at = max(at, other.offset + other.nbytes)
        row.offset = at
        placed.append(row)
    named = {row.name: row for row in rows}
    for row in rows:
        if row.within:
            host = named[row.within]
            assert row.nbytes <= host.nbytes and row.phases <= host.phases, f"{row.name} does not fit in {row.within}"
            row.offset = host.offset
    return Plan(named, max(r.offset + r.nbytes for r in rows))


def carve(table: type, rows: dict[str, Row], arena: Tensor, dims: dict[str, int]) -> Any:
    """An instance of `table` whose fields are views of `arena`, shaped by `dims` (at most the planned sizes), None
    where there is no row.
    """

    def view(row: Row, slot: int) -> Tensor:
        shape = sizes(row.spec, dims)
        assert math.prod(shape) <= math.prod(row.shape), f"{row.name} {shape} exceeds the planned {row.shape}"
        start = row.offset + slot * row.copy_bytes
        return arena[start : start + math.prod(shape) * row.dtype.itemsize].view(row.dtype).view(shape)

    def cut(name: str) -> Any:
        if name not in rows:
            return None
        row = rows[name]
        return view(row, 0) if row.slots is None else [view(row, slot) for slot in row.slots]

    return table(**{field.name: cut(field.name) for field in dataclasses.fields(table)})


def largest_batch(total_bytes: Callable[[int], int], budget: int) -> int:
    """The largest batch whose plan fits `budget` bytes (0 if none does); `total_bytes(B)` grows with B."""
    low, high = 0, 1
    while total_bytes(high) <= budget:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total_bytes(middle) <= budget else (low, middle)
    return low
