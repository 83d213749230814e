"""How a compiled kernel loads the operands of its products, read from what
Triton makes of it, without a GPU.

An operand is a tile that a product takes as it was loaded, but for its layout, shape or width.
Triton's last IR (`ttgir`) shows how it comes there: copied to shared memory asynchronously, or
through registers.  The machine code shows by how many bits: its instructions have the line of
the source that they come from.
"""

import math
import re
from collections import Counter
from typing import Any, NamedTuple

ASYNC_COPIES = {  # to shared memory; the last for gfx950
    "ttg.async_copy_global_to_local",
    "amdg.buffer_load_to_local",
    "amdgpu.buffer_load_to_local",
}
LOADS = {"tt.load", "amdg.buffer_load", "amdgpu.buffer_load", *ASYNC_COPIES}
UNCHANGED = {  # operations whose result has the elements of the first operand
    *(
        "ttg.convert_layout",
        "ttg.local_load",
        "ttg.memdesc_index",
        "ttg.memdesc_trans",
        "ttg.memdesc_subslice",
    ),
    *(
        "ttg.memdesc_reinterpret",
        "ttg.memdesc_reshape",
        "tt.trans",
        "tt.reshape",
        "tt.bitcast",
        "tt.fp_to_fp",
    ),
    *("arith.extf", "arith.truncf", "amdg.in_thread_transpose", "amdgpu.in_thread_transpose"),
}
VALUE = r"%[\w.$-]+(?:#\d+)?"
OPERATION = re.compile(rf"\s*(?:({VALUE})(?::\d+)? = )?\"?([\w.]+)\"?(.*)")
BLOCK = re.compile(r"<((?:\d+x)+)(?:!tt\.ptr<)?(\w+)")
INTO = re.compile(rf"\binto ({VALUE})")
BITS = {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}  # of AMD's instructions
FILE = re.compile(r'^\t\.file\t(\d+) "([^"]*)"(?: "([^"]*)")?', re.MULTILINE)
NVIDIA_LOAD = re.compile(
    r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)|\bcp\.async\.c[ag]\.[^;]*\], 0x([0-9a-f]+)"
)
# not gfx950's loads that transpose, of 64 bits, as ds_read_b64_tr_b16
NARROW = re.compile(r"\bds_(?:read|write|load|store)(?!\w*_tr_)\w*_(?:[ui]?8|b8|[ui]16|b16)\w*")
AMD_LOAD = re.compile(
    r"\b(?:global|buffer|flat)_load_(?:lds_|d16_|d16_hi_|short_|[su]?(?=byte|short))?(\w+)"
)

Place = tuple[str, int]  # file and line


class Operation(NamedTuple):
    name: str
    operands: tuple[str, ...]
    elements: int  # of the first block among its types, of a copy's last, and their type
    dtype: str
    loops: tuple[int, ...]  # lines of the loops around it, outermost first
    place: Place | None


class OperandLoads(NamedTuple):
    """The type of a kernel's operands, and a thread's bits of the smallest block; asynchronous
    loads of operands in the loops of their products, and all others there, for which a product
    waits; all accesses of operands' loads, by bits; accesses of less than 32 bits of AMD's shared
    memory.
    """

    dtype: str
    share: int
    asynchronous: int
    plain: int
    accesses: dict[int, int]
    narrow: int


class Graph:
    """The operations of a kernel in Triton's last IR.  There a value's name is unique in
    a region; here everywhere.
    """

    def __init__(self, text: str):
        self.products: list[Operation] = []
        self.loads: list[Operation] = []
        self._defined: dict[str, Operation] = {}
        # of what a loop carries or a branch returns: the values it may have
        self._choices: dict[str, list[str]] = {}
        self._writers: list[tuple[Operation, str]] = []  # of shared memory, and what they write
        self._scopes: list[dict[str, str]] = [{}]
        # operation, its results, what it carries
        self._regions: list[tuple[str, list[str], list[str]]] = []
        self._loops: list[int] = []
        self._places = _places(text)
        self.threads = math.prod(
            int(n) for n in re.findall(r'"ttg\.(?:num-warps|threads-per-warp)" = (\d+)', text)
        )
        for number, line in enumerate(text.splitlines()):
            self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        code, _, place = line.rpartition(" loc(") if " loc(" in line else (line, "", "")
        if code.strip().startswith("}"):
            self._close(again=code.rstrip().endswith("{"))
            return
        found = OPERATION.match(code)
        if not found or not line[:1].isspace():
            return
        result, name, rest = found.groups()
        if name == "scf.yield":
            _, results, carried = self._regions[-1]
            for i, value in enumerate(self._values(rest)):
                for to in (results[i : i + 1], carried[i : i + 1]):
                    if to:
                        self._choices[to[0]].append(value)
        elif line.rstrip().endswith("{"):
            self._open(number, result, name, rest)
        else:
            operands = tuple(self._values(rest))
            types = rest.rpartition("->")[2] if name in ASYNC_COPIES else rest
            sizes, dtype = BLOCK.search(types).groups() if BLOCK.search(types) else ("", "")
            elements = math.prod(int(size) for size in re.findall(r"\d+", sizes))
            here = self._places.get(place.rstrip(")"))
            operation = Operation(name, operands, elements, dtype, tuple(self._loops), here)
            if result:
                self._defined[self._define(result, number)] = operation
            if name.startswith("tt.dot"):
                self.products.append(operation)
            if name in LOADS:
                self.loads.append(operation)
            if name == "ttg.local_store" or name in ASYNC_COPIES:
                into = INTO.search(rest)
                target = self._resolve(into[1]) if into else operands[1]
                self._writers.append((operation, target))

    def _open(self, number: int, result: str | None, name: str, rest: str) -> None:
        """Begin the region of an operation."""
        pairs = re.findall(rf"({VALUE}) = ({VALUE})", rest.partition("iter_args(")[2])
        initial = [self._resolve(value) for _, value in pairs]
        count = len(pairs) or len(rest.rpartition("->")[2].split(", ")) if result else 0
        results = [self._define(f"{result}#{i}", number) for i in range(count)]
        if count == 1 and result:
            self._scopes[-1][result] = results[0]
        self._scopes.append({})
        carried = [self._define(argument, number) for argument, _ in pairs]
        for names in (results, carried):
            self._choices.update({to: initial[i : i + 1] for i, to in enumerate(names)})
        self._regions.append((name, results, carried))
        self._loops += [number] if name in ("scf.for", "scf.while") else []

    def _close(self, again: bool) -> None:
        """End a region; `again` if the operation has another one, as `else`."""
        self._scopes.pop()
        if again:
            self._scopes.append({})
        elif self._regions and self._regions.pop()[0] in ("scf.for", "scf.while"):
            self._loops.pop()

    def _define(self, name: str, number: int) -> str:
        self._scopes[-1][name] = f"{name}@{number}"
        return self._scopes[-1][name]

    def _resolve(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)

    def _values(self, text: str) -> list[str]:
        return [self._resolve(name) for name in re.findall(VALUE, text.partition(" : ")[0])]

    def origins(self, value: str) -> list[Operation]:
        """Return the loads that an operand comes from, through registers or shared memory."""
        found, seen, todo = list[Operation](), set[str](), [value]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            todo += self._choices.get(name, [])
            operation = self._defined.get(name)
            if operation is None:
                continue
            if operation.name in LOADS:
                found.append(operation)
            elif operation.name in UNCHANGED:
                todo += operation.operands[:1]
            elif operation.name == "ttg.local_alloc":
                todo += operation.operands
                for writer, target in self._writers:
                    if name in self._views(target):
                        copies = writer.name in ASYNC_COPIES
                        found += [writer] if copies else []
                        todo += [] if copies else writer.operands[:1]
        return found

    def _views(self, value: str) -> set[str]:
        """Return the values of which a view of shared memory may be a part."""
        found, todo = set[str](), [value]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self._choices.get(name, [])
                operation = self._defined.get(name)
                todo += operation.operands[:1] if operation and operation.name in UNCHANGED else []
        return found


def _places(text: str) -> dict[str, Place]:
    """Return the innermost file and line of each location that the IR names."""
    lines = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def place(name: str) -> Place | None:
        here = lines.get(name, "")
        if direct := re.match(r'"([^"]+)":(\d+):\d+', here):
            return direct[1], int(direct[2])
        inner = re.search(r"#loc\d*", here)  # of a name, or the callee of a call
        return place(inner[0]) if inner else None

    return {name: found for name in lines if (found := place(name))}


def accesses(code: str) -> dict[Place, Counter[int]]:
    """Count the loads from each place in PTX or in AMD's assembly, by the bits
    that a thread loads at once.
    """
    files = {number: "/".join(filter(None, path)) for number, *path in FILE.findall(code)}
    found: dict[Place, Counter[int]] = {}
    place = ("", 0)
    inside = False  # inline assembly, whose lines count on from its place
    located = False
    for line in code.splitlines():
        if line.startswith("\t// begin inline asm"):
            inside = True
            located = False
        elif line.startswith("\t// end inline asm"):
            inside = False
        elif moved := re.match(r"\t\.loc\t(\d+) (\d+)", line):
            if not (inside and located):
                place = files.get(moved[1], ""), int(moved[2])
            located = True
        elif bits := bits_loaded(line):
            found.setdefault(place, Counter())[bits] += 1
    return found


def bits_loaded(line: str) -> int:
    """Return the bits that a thread loads from global memory by this
    instruction; 0 if it loads nothing.
    """
    if load := NVIDIA_LOAD.search(line):
        return 8 * int(load[3], 16) if load[3] else int(load[1] or 1) * int(load[2])
    load = AMD_LOAD.search(line)
    return bits_of(load[1]) if load else 0


def bits_of(suffix: str) -> int:
    """Return the bits of an AMD load by the end of its name, as dwordx4, b128, ushort or
    u8, or of a type, as f32.
    """
    if suffix in BITS:
        return BITS[suffix]
    number = re.search(r"\d+", suffix)
    return int(number[0]) if number else 8 if "byte" in suffix else 16


def operand_loads(kernel: Any) -> OperandLoads | None:
    """Return the loads of a compiled kernel's operands; None if it multiplies nothing."""
    graph, code = Graph(kernel.asm["ttgir"]), kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    loads = [
        (product, load)
        for product in graph.products
        for o in product.operands[:2]
        for load in graph.origins(o)
    ]
    if not graph.products:
        return None
    assert len({product for product, _ in loads}) == len(graph.products), (
        "operands come by operations unknown here"
    )
    within = {
        id(load): load for product, load in loads if product.loops and load.loops == product.loops
    }
    loops = {product.loops for product in graph.products if product.loops}
    plain = sum(load.loops in loops and load.name not in ASYNC_COPIES for load in graph.loads)
    kinds = Counter(load.name in ASYNC_COPIES for load in within.values())
    by_place = accesses(code)
    places = {load.place for _, load in loads if load.place}
    assert places and places <= by_place.keys(), (
        f"no loads in the machine code from {places - by_place.keys()}"
    )
    bits = sum((by_place[place] for place in places), Counter[int]())
    narrow = len(NARROW.findall(code))
    share = min(load.elements * bits_of(load.dtype) // graph.threads for _, load in loads)
    return OperandLoads(graph.products[0].dtype, share, kinds[True], plain, dict(bits), narrow)
